// Sums of all ranks' elements, in rank order, over arrays that this process can address.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "shared/flag_task.h"

namespace pycomm::shared {

// Bytes per step: with all its summands it stays in the L1 cache.
inline constexpr size_t kBlockBytes = size_t{8} << 10;

// into = the sums of `count` elements of every rank, read from from(rank). `into` may be one of
// these. Calls then(offset, bytes) after each block.
template <typename From, typename Then>
void add_up(const engine::Job& job, int size, std::byte* into, size_t count, const From& from,
            const Then& then) {
  const size_t element = job.element_bytes, block = kBlockBytes / element;
  alignas(64) std::array<std::byte, kBlockBytes> sum;
  const bool joins = job.folds && size > 2;  // the sum of two is rounded once in any case
  std::vector<const void*> summands(joins ? static_cast<size_t>(size) : 0);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = std::min(block, count - begin), offset = begin * element;
    const auto summand = [&](int rank) { return from(rank) + offset; };
    if (joins) {
      for (int i = 0; i < size; ++i) summands[static_cast<size_t>(i)] = summand(i);
      job.reducer->join(into + offset, summands.data(), n, size);
    } else {
      const std::byte* so_far = summand(0);
      for (int i = 1; i < size - 1; ++i) {
        job.reducer->reduce(sum.data(), so_far, summand(i), n);
        so_far = sum.data();
      }
      if (job.parts == 0)
        job.reducer->finish(into + offset, so_far, summand(size - 1), n, size);
      else
        job.reducer->reduce(into + offset, so_far, summand(size - 1), n);
    }
    then(offset, n * element);
  }
}

}  // namespace pycomm::shared
