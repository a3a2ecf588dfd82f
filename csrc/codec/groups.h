// A packet of groups: the values of k groups of neighbours, and the index of each group. The layout
// is that of a compact packet (compact.h) with these differences:
//
//   "PL", 2          magic, version
//   k, count, values three varints: selected groups, all groups, and values in the packet
//   values           [values] instead of [k]: all values of the groups, in order
//   indices          of groups; no bytes if k = count
//
// The number of values is k times the size of a group, less what the last groups of tensors lack.
// The receiver knows the sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "codec/format.h"

namespace pycomm::codec {

struct GroupHeader {
  IndexCode index_code;
  ValueCode value_code;
  size_t k;
  size_t count;
  size_t values;
  size_t bytes;  // of the header itself
};

// Reads the header of a packet of `size` arbitrary bytes; throws InvalidArgument unless every field
// is valid. `bytes`: the first ones, at least kMostGroupHead unless the packet is shorter.
GroupHeader read_group_header(std::span<const std::byte> bytes, size_t size);
inline GroupHeader read_group_header(std::span<const std::byte> bytes) {
  return read_group_header(bytes, bytes.size());
}

struct Groups {
  std::span<const int32_t> indices;
  size_t count;
  size_t values;
  ValueCode value_code;
};

// Maximum size of such a packet.
size_t most_group_bytes(size_t k, size_t count, size_t values, ValueCode value_code);

// Calls task(i) for each i below `tasks`, in any order, and returns when all are done.
using RunTasks = std::function<void(size_t tasks, const std::function<void(size_t)>& task)>;

// The values of a packet, as the caller stores them; called from several threads.
class GroupValues {
 public:
  // Copies the values from `first` on.
  virtual void read(size_t first, std::span<float> values) const = 0;
  // Receives value - decoded value, or 0 if that is not finite, after these values were read.
  virtual void write_errors(size_t first, std::span<const float> errors) const = 0;

 protected:
  ~GroupValues() = default;
};

// Writes a packet to `out`, of most_group_bytes(), with the shortest index code, and returns its
// size. Throws InvalidArgument, before any change, unless the indices ascend in 0..count-1.
size_t encode_groups(const Groups& groups, const GroupValues& values, std::byte* out,
                     const RunTasks& run);

// A packet of arbitrary bytes, which must outlive it. Throws InvalidArgument unless its header is
// valid, its size matches and the padding of its values is zero.
class GroupReader {
 public:
  explicit GroupReader(std::span<const std::byte> bytes);
  const GroupHeader& header() const { return header_; }
  // Reads indices [k]. Throws InvalidArgument unless they ascend in 0..count-1 and their padding is
  // zero; `indices` may have changed then.
  void read_indices(int32_t* indices) const;
  // Reads whole blocks from value `first` on; the last one may be shorter. The thread must have
  // ExactFloats.
  void read_values(size_t first, std::span<float> values) const;

 private:
  std::span<const std::byte> bytes_;
  GroupHeader header_;
};

// Decodes a packet into indices [k] and values [values], with the errors of GroupReader; the arrays
// may have changed then.
void decode_groups(const GroupReader& packet, int32_t* indices, float* values, const RunTasks& run);

}  // namespace pycomm::codec
