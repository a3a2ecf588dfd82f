// A lean packet: k of (index, value) in few bytes, beside the raw packet of packet.h, which is as
// long as k says and whose arrays can be read where they lie. This one is as long as its indices
// need, and is decoded into arrays. Little-endian; nothing in it is aligned.
//
//   "PL", 1          what it is, and the version
//   codes            a byte: index code + 16 * value code
//   k, count         two numbers, 7 bits a byte, lowest first; the top bit: another byte follows
//   values           float32, bfloat16   [k] as they are
//                    int8   for each 256: a scale, float32; then [k] numbers: number * scale
//                    2bit   for each 4096: two levels, bfloat16; then 2 bits each, lowest first:
//                           the sign, and which level
//                    1bit   for each 4096: a level, bfloat16; then 1 bit each: the sign
//                    3bit   for each 4096: two numbers of 2 bytes, low and step; then 3 bits each,
//                           lowest first: the sign, and q. The magnitude is the bfloat16 with the
//                           bits low + q * step + step / 2, at most the largest finite one: even
//                           steps in the exponent, from the least magnitude, but no more than
//                           eight octaves. A low that is not finite: all are NaN
//   indices          list   [k] int32
//                    bitmap [count] bits
//                    rice   unary [..] bits, then remainders [..] bits
//
// Bits go into bytes lowest first, and the last byte of each of these arrays is filled with zeros.
//
// The Rice code writes gaps: index[i] - index[i - 1] - 1, for the first index itself. 64 of them
// are a block and share a parameter b, the least for which the sum of (gap / 2^b + 1) / 2, both
// rounded down, is at most their number: no other b takes fewer bits. A number n in unary is n
// zeros and a one. Written so are first the parameters, each as its difference d to the one before
// (2d - 1 if it is positive, else -2d), then for each gap the quotient by 2^b, and in b bits each
// the remainders. The parameter before the first is that of gaps of one size, rice_start().
// So where a quotient ends is a matter of counting ones and where a remainder lies of adding up
// parameters: both directions are prefix sums.
//
// Called by the bindings; the loops are in kernels/cpu/.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"
#include "kernels/device_kernels.h"

namespace pycomm {

inline constexpr std::array<char, 3> kLeanMagic{'P', 'L', 1};

enum class IndexCode : uint8_t { list, bitmap, rice };
enum class ValueCode : uint8_t { float32, bfloat16, int8, two_bit, one_bit, three_bit };
inline constexpr std::array<std::string_view, 3> kIndexCodes{"list", "bitmap", "rice"};
inline constexpr std::array<std::string_view, 6> kValueCodes{"float32", "bfloat16", "int8",
                                                             "2bit",    "1bit",     "3bit"};

struct LeanHeader {
  IndexCode index_code;
  ValueCode value_code;
  size_t k;
  size_t count;
  size_t bytes;  // of the header itself
};

// Whether the bytes begin as a lean packet of any version does.
bool is_lean(std::span<const std::byte> bytes);

// The header of bytes from anywhere; throws InvalidArgument unless every field can be believed. Of
// a packet of `size` bytes it needs the first ones alone, as many as a header has at most.
LeanHeader read_lean_header(std::span<const std::byte> bytes, size_t size);
inline LeanHeader read_lean_header(std::span<const std::byte> bytes) {
  return read_lean_header(bytes, bytes.size());
}

// What the encoder is asked for: `automatic` takes the index code of fewest bytes, of equals the
// first of the enum.
struct LeanEncoding {
  size_t count;
  Dtype dtype;  // of the values and of the residual: float32 or float64
  bool automatic;
  IndexCode index_code;  // unless automatic
  ValueCode value_code;
  void* residual;  // [count]: what rounding lost is added at the indices; may be null
};

// The most that such a packet of k elements takes.
size_t most_lean_bytes(size_t k, const LeanEncoding& encoding);

// Writes a packet to `out`, of most_lean_bytes(); how many bytes it took. Values are rounded to
// float32 first. Throws InvalidArgument, before anything changes, unless the indices ascend in
// 0..count-1.
size_t encode_lean(const Packet& packet, const LeanEncoding& encoding, std::byte* out);

// Reads a packet into indices [k] and values [k]. Throws InvalidArgument unless the bytes end where
// their numbers say, padded with zeros, and the indices ascend in 0..count-1; the arrays may have
// changed then.
void decode_lean(std::span<const std::byte> bytes, int32_t* indices, float* values);

// floor(log2(ln 2 * count / k)), or 0: near the parameter of k gaps of one size.
constexpr int rice_start(size_t k, size_t count) {
  const uint64_t scaled = (uint64_t{count} * 45426 / k) >> 16;  // ln 2 = 45426 / 65536
  return scaled == 0 ? 0 : static_cast<int>(std::bit_width(scaled)) - 1;
}

}  // namespace pycomm
