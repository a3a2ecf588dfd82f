// Sets of indices as bytes, by the codes of lean.h. Called by lean.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/lean.h"

namespace pycomm::cpu {

// What the Rice code of some indices takes; found in a pass of its own, as bytes are counted before
// a code is chosen.
struct RicePlan {
  std::vector<uint8_t> parameters;  // of each block
  uint64_t unary_bits = 0;
  uint64_t remainder_bits = 0;
  size_t bytes() const;
};
RicePlan plan_rice(std::span<const int32_t> indices, size_t count);

// These write indices that ascend, to as many bytes as were counted; where the next byte goes.
std::byte* write_list(std::span<const int32_t> indices, std::byte* out);
std::byte* write_bitmap(std::span<const int32_t> indices, size_t count, std::byte* out);
std::byte* write_rice(std::span<const int32_t> indices, size_t count, const RicePlan& plan,
                      std::byte* out);

// Reads k = indices.size() of `count`. Throws InvalidArgument unless the bytes end where the code
// does, padded with zeros, and the indices ascend in 0..count-1; `indices` may have changed then.
// Whether the parameters of a Rice code are those that the writer would choose is not checked.
void read_indices(IndexCode code, std::span<const std::byte> bytes, size_t count,
                  std::span<int32_t> indices);

}  // namespace pycomm::cpu
