// Checks received indices: they must ascend in the range of their array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/errors.h"

namespace pycomm::codec {

// Throws InvalidArgument, with the first invalid index, unless they ascend in 0..count-1.
inline void check_indices(std::span<const int32_t> indices, size_t count) {
  if (indices.empty()) return;
  // An integer, because a loop over a bool does not vectorize.
  unsigned bad = indices[0] < 0 || static_cast<size_t>(indices.back()) >= count ? 1 : 0;
  for (size_t i = 1; i < indices.size(); ++i) bad |= indices[i - 1] >= indices[i] ? 1 : 0;
  if (bad == 0) return;
  int64_t before = -1;
  for (size_t i = 0; i < indices.size(); before = indices[i++])
    if (indices[i] <= before || indices[i] >= static_cast<int64_t>(count))
      throw InvalidArgument("invalid index " + std::to_string(indices[i]) + " at position " +
                            std::to_string(i) + ": indices must ascend within 0.." +
                            std::to_string(static_cast<int64_t>(count) - 1));
}

}  // namespace pycomm::codec
