// A compact packet: k pairs (index, value) in few bytes. The raw packet of packet.h has a size that
// depends on k only, and its arrays are readable in place. The size of a compact packet depends on
// its indices, and it is decoded into arrays. Little-endian; no field is aligned.
//
//   "PL", 1          magic, version
//   codes            one byte: index code + 16 * value code
//   k, count         two varints: 7 bits per byte, lowest first; top bit set: another byte follows
//   values           float32, bfloat16   [k] unchanged
//                    2bit   per 4096 values: two levels, bfloat16; then 2 bits each, lowest first:
//                           the sign, and the level
//                    1bit   per 4096 values: a level, bfloat16; then 1 bit each: the sign
//                    3bit   per 4096 values: two numbers of 2 bytes, low and step; then 3 bits
//                           each, lowest first: the sign, and q. The magnitude is the bfloat16 with
//                           the bits low + q * step + step / 2, at most the largest finite one:
//                           equal steps in the exponent, from the smallest magnitude, over at most
//                           eight octaves. If low is not finite, all values are NaN
//   indices          list   [k] int32
//                    bitmap [count] bits
//                    rice   unary [..] bits, then remainders [..] bits
//
// Bits fill bytes lowest first, and the last byte of each of these arrays is padded with zeros.
//
// The Rice code encodes gaps: index[i] - index[i - 1] - 1, and the first index itself. A block is
// 64 gaps with one parameter b, the smallest for which the sum of (gap / 2^b + 1) / 2, both rounded
// down, is at most the number of gaps: no other b takes fewer bits. A number n in unary is n zeros
// and a one. The unary array has first the parameters, each as its difference d to the previous one
// (2d - 1 if positive, else -2d), then the quotient of each gap by 2^b. The remainders have b bits
// each. The first parameter is relative to rice_start(), the parameter of equal gaps. So the end of
// a quotient follows from a count of ones, and the offset of a remainder from a sum of parameters:
// encoder and decoder are prefix sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/format.h"
#include "core/dtype.h"

namespace pycomm::codec {

struct CompactHeader {
  IndexCode index_code;
  ValueCode value_code;
  size_t k;
  size_t count;
  size_t bytes;  // of the header itself
};

// Whether the bytes start with the magic of a compact packet, of any version.
bool is_compact(std::span<const std::byte> bytes);

// Reads the header of arbitrary bytes; throws InvalidArgument unless every field is valid. Of a
// packet of `size` bytes it needs only the first ones, up to the maximum size of a header.
CompactHeader read_compact_header(std::span<const std::byte> bytes, size_t size);
inline CompactHeader read_compact_header(std::span<const std::byte> bytes) {
  return read_compact_header(bytes, bytes.size());
}

// Options of the encoder. `automatic` selects the index code with the fewest bytes, the first of
// the enum if equal.
struct CompactCodes {
  Dtype dtype;  // of the values and of their errors: float32 or float64
  bool automatic;
  IndexCode index_code;  // if not automatic
  ValueCode value_code;
};

// The elements of a packet, and where it is written. A row of 64-bit words from Python.
struct CompactSource {
  const int32_t* indices;  // [k]; the packet has them less `first`
  const void* values;      // [k]
  size_t k;
  size_t first;
  size_t count;
  void* errors;    // [k], as the values: value - encoded value; may be null
  std::byte* out;  // most_compact_bytes()
};

// Maximum size of a packet of k elements of `count`.
size_t most_compact_bytes(size_t k, size_t count, const CompactCodes& codes);

// Writes a packet and returns its size. Values are rounded to float32 first. Throws
// InvalidArgument, before any change, unless the indices ascend in first..first+count-1.
size_t encode_compact(const CompactSource& from, const CompactCodes& codes);

// Decodes a packet into indices [k] and values [k]. Throws InvalidArgument unless the size matches
// the header, padding is zero and the indices ascend in 0..count-1; the arrays may have changed
// then.
void decode_compact(std::span<const std::byte> bytes, int32_t* indices, float* values);

}  // namespace pycomm::codec
