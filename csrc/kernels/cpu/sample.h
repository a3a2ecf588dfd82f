// Estimates a lower bound for the k largest of `count` elements from a sample. select.h uses it
// when no earlier bound is known.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

#include "cpu/floats.h"

namespace pycomm::kernels {

inline constexpr size_t kSample = 16384;
inline constexpr size_t kRun = 16;  // neighbours in one cache line

// `read(i)` returns an element, 0 <= i < count. The bound is four standard deviations of the sample
// below the expected k-th magnitude. It is 0 (no bound) if the sample is too small.
template <typename Read>
auto sample_bound(size_t count, size_t k, Read&& read) {
  using Key = decltype(cpu::key_of(read(size_t{0})));
  const size_t runs = std::min(kSample, count / 4) / kRun;
  const double share = static_cast<double>(k) / static_cast<double>(count);
  const double expected = share * static_cast<double>(runs * kRun);
  const auto rank = static_cast<size_t>(expected + 4 * std::sqrt(expected) + 2);
  if (rank >= runs * kRun) return Key{0};
  std::vector<Key> keys(runs * kRun);
  auto at = keys.begin();
  for (size_t run = 0; run < runs; ++run) {
    const size_t begin = run * (count / runs);
    for (size_t i = begin; i < begin + kRun; ++i) *at++ = cpu::key_of(read(i));
  }
  std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(rank), keys.end(),
                   std::greater<>());
  return keys[rank];
}

}  // namespace pycomm::kernels
