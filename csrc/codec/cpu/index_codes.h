// Encodes and decodes index sets with the codes of compact.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/compact.h"

namespace pycomm::codec {

// Size and parameters of a Rice code. A separate pass computes them, because sizes are compared
// before a code is chosen.
struct RicePlan {
  std::vector<uint8_t> parameters;  // of each block
  uint64_t unary_bits = 0;
  uint64_t remainder_bits = 0;
  size_t bytes() const;
};
RicePlan plan_rice(std::span<const int32_t> indices, size_t count);

// Write ascending indices to as many bytes as were computed; return the position of the next byte.
std::byte* write_list(std::span<const int32_t> indices, std::byte* out);
std::byte* write_bitmap(std::span<const int32_t> indices, size_t count, std::byte* out);
std::byte* write_rice(std::span<const int32_t> indices, size_t count, const RicePlan& plan,
                      std::byte* out);

// Reads k = indices.size() indices of `count`. Throws InvalidArgument unless the bytes end with the
// code, padding is zero and the indices ascend in 0..count-1; `indices` may have changed then. It
// does not check that Rice parameters are the ones that the encoder would choose.
void read_indices(IndexCode code, std::span<const std::byte> bytes, size_t count,
                  std::span<int32_t> indices);

}  // namespace pycomm::codec
