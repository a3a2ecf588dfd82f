// A compact packet: the values of k groups of neighbours, and the index of each group, in few
// bytes. A group has one element unless the sender says otherwise. The raw packet of packet.h has a
// size that depends on k only, and its arrays are readable in place. The size of a compact packet
// depends on its indices, and it is decoded into arrays. Little-endian; no field is aligned.
//
//   "PL", 1          magic, version
//   codes            one byte: index code + 16 * value code
//   group            one byte: log2 of the elements of a group
//   k, count         selected groups, all groups. Two varints: 7 bits per byte, lowest first; top
//                    bit set: another byte follows
//   values           [k * group], those after the end of an array are 0:
//                    float32, bfloat16   unchanged
//                    2bit   per 4096 values: two levels, bfloat16; then 2 bits each, lowest first:
//                           the sign, and the level
//                    1bit   per 4096 values: a level, bfloat16; then 1 bit each: the sign
//                    3bit   per 4096 values: two numbers of 2 bytes, low and step; then 3 bits
//                           each, lowest first: the sign, and q. The magnitude is the bfloat16 with
//                           the bits low + q * step + step / 2, at most the largest finite one:
//                           equal steps in the exponent, from the smallest magnitude, over at most
//                           eight octaves. If low is not finite, all values are NaN
//   indices          of groups; no bytes if k = count
//                    list   [k] int32
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
#include <functional>
#include <span>

#include "codec/format.h"
#include "core/dtype.h"

namespace pycomm::codec {

struct CompactHeader {
  IndexCode index_code;
  ValueCode value_code;
  size_t group;
  size_t k;
  size_t count;
  size_t bytes;  // of the header itself

  size_t values() const { return k * group; }
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

// The groups of a packet.
struct CompactGroups {
  std::span<const int32_t> indices;
  size_t count;  // of all groups
  size_t group = 1;
};

// Maximum size of a packet of k groups of `count`.
size_t most_compact_bytes(size_t k, size_t count, size_t group, const CompactCodes& codes);

// Calls task(i) for each i below `tasks`, in any order, and returns when all are done.
using RunTasks = std::function<void(size_t tasks, const std::function<void(size_t)>& task)>;

// The values of a packet, as the caller stores them; called from several threads, each block of
// kValueBlock values once.
class BlockValues {
 public:
  // Copies the values from `first` on, rounded to float32.
  virtual void read(size_t first, std::span<float> values) const = 0;
  // Whether sent() is called. It receives the same values, and those that a receiver decodes, which
  // it may change.
  virtual bool wants_sent() const { return true; }
  virtual void sent(size_t first, std::span<const float> own, std::span<float> decoded) const = 0;

 protected:
  ~BlockValues() = default;
};

// Writes a packet to `out`, of most_compact_bytes(), and returns its size. Throws InvalidArgument,
// before any change, unless the indices ascend in 0..count-1.
size_t encode_compact(const CompactGroups& groups, const CompactCodes& codes,
                      const BlockValues& values, std::byte* out, const RunTasks& run);

// A packet of arbitrary bytes, which must outlive it. Throws InvalidArgument unless its header is
// valid, its size matches and the padding of its values is zero.
class PacketReader {
 public:
  explicit PacketReader(std::span<const std::byte> bytes);
  const CompactHeader& header() const { return header_; }
  // Reads indices [k]. Throws InvalidArgument unless they ascend in 0..count-1 and their padding is
  // zero; `indices` may have changed then.
  void read_indices(int32_t* indices) const;
  // Reads whole blocks from value `first` on; the last one may be shorter. The thread must have
  // ExactFloats.
  void read_values(size_t first, std::span<float> values) const;

 private:
  std::span<const std::byte> bytes_;
  CompactHeader header_;
};

}  // namespace pycomm::codec
