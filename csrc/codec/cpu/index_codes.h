// Encodes and decodes index sets with the codes of compact.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "codec/format.h"

namespace pycomm::codec {

// Size and parameters of a Rice code. A separate pass computes them, because sizes are compared
// before a code is chosen.
struct RicePlan {
  std::vector<uint8_t> parameters;  // of each block
  uint64_t unary_bits = 0;
  uint64_t remainder_bits = 0;
};

// How to write an index set.
struct IndexPlan {
  IndexCode code;
  RicePlan rice;  // if computed
};
// With the fixed code, or with the one of the fewest bytes: the first of the enum if equal.
IndexPlan plan_indices(std::span<const int32_t> indices, size_t count,
                       std::optional<IndexCode> fixed);

// Writes ascending indices as planned; returns the position of the next byte.
std::byte* write_indices(std::span<const int32_t> indices, size_t count, const IndexPlan& plan,
                         std::byte* out);

// Reads k = indices.size() indices of `count`. Throws InvalidArgument unless the bytes end with the
// code, padding is zero and the indices ascend in 0..count-1; `indices` may have changed then. It
// does not check that Rice parameters are the ones that the encoder would choose.
void read_indices(IndexCode code, std::span<const std::byte> bytes, size_t count,
                  std::span<int32_t> indices);

}  // namespace pycomm::codec
