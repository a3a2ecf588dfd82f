// Sums of packets on the CPU, and what is done with them: one pass in index order over ranges of
// 16384 elements. Each range keeps its sums and a flag per element, or group of elements, with a
// value, so each touched cache line of the target is visited once for any number of packets.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "codec/packet.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/threads.h"
#include "kernels/device_kernels.h"

namespace pycomm::kernels {

inline constexpr size_t kRange = 16384;

template <Dtype kDtype>
using RealOf = std::conditional_t<kDtype == Dtype::float64, double, float>;

// The arrays of a chain, split into runs of at most kRange elements of one array.
class Ranges {
 public:
  struct IndexRange {
    Array array;
    size_t begin;  // in the array
    size_t count;
    size_t first;  // of the range, in the chain
  };
  Ranges(const Chain& chain, size_t per_task) : per_task_(per_task) {
    size_t first = 0;
    for (const Array& array : chain.arrays) {
      for (size_t begin = 0; begin < array.count; begin += kRange)
        ranges_.push_back({array, begin, std::min(kRange, array.count - begin), first + begin});
      first += groups_in(array.count, chain.group) * chain.group;
    }
  }
  size_t tasks() const { return (ranges_.size() + per_task_ - 1) / per_task_; }
  std::span<const IndexRange> of_task(size_t task) const {
    const size_t first = task * per_task_;
    return std::span(ranges_).subspan(first, std::min(per_task_, ranges_.size() - first));
  }

 private:
  size_t per_task_;
  std::vector<IndexRange> ranges_;
};

// Calls f(i) for i below n, the sizes of usual groups as vectors.
template <typename F>
[[gnu::always_inline]] inline void each_below(size_t n, F&& f) {
  constexpr size_t kUsual = 16;
  size_t i = 0;
  for (; i + kUsual <= n; i += kUsual)
#pragma GCC ivdep
#pragma GCC unroll 1
    for (size_t j = i; j < i + kUsual; ++j) f(j);
  for (; i < n; ++i) f(i);
}

// Sums the values of the packets for one range after another. kGroups: the indices are those of
// groups, and a packet has all values of each.
template <typename Real, Dtype kValue, bool kGroups>
class Sums {
 public:
  // `first`: the first element of the first range. kGroups: `group` elements have one index.
  Sums(std::span<const codec::Packet> packets, size_t first, size_t group)
      : packets_(packets), group_(group), next_(packets.size()) {
    const auto from = static_cast<int64_t>(first / unit());
    for (size_t p = 0; p < packets.size(); ++p) {
      const std::span<const int32_t> indices(packets[p].indices, packets[p].count);
      const auto at = std::lower_bound(indices.begin(), indices.end(), from);
      next_[p] = static_cast<size_t>(at - indices.begin());
    }
  }

  // `array`: the first element of the range, of `bytes` each.
  [[gnu::always_inline]] void add_up(const Ranges::IndexRange& range, const std::byte* array,
                                     size_t bytes) {
    touched_ = 0;
    count_ = range.count;
    const auto first = static_cast<int64_t>(range.first / unit());
    const auto end = static_cast<int64_t>((range.first + range.count + unit() - 1) / unit());
    for (size_t p = 0; p < packets_.size(); ++p) {
      const codec::Packet& packet = packets_[p];
      size_t at = next_[p];
      while (at < packet.count && packet.indices[at] < first) ++at;  // in no array
      for (; at < packet.count && packet.indices[at] < end; ++at) {
        const auto i = static_cast<uint32_t>(packet.indices[at] - first);
        const std::byte* const target = array + i * unit() * bytes;
        __builtin_prefetch(target, 1);
        if constexpr (kGroups) __builtin_prefetch(target + (unit() - 1) * bytes, 1);
        add(packet.values, at, i);
      }
      next_[p] = at;
    }
  }

  // Calls f(i, sum) for each element of the range with a sum.
  template <typename F>
  [[gnu::always_inline]] void each(F&& f) {
    for (size_t j = 0; j < touched_; ++j) {
      const size_t begin = places_[j] * unit(), n = std::min(unit(), count_ - begin);
      const Real* const sums = &sums_[j * unit()];
      each_below(n, [&](size_t i) __attribute__((always_inline)) { f(begin + i, sums[i]); });
      slots_[places_[j]] = 0;
    }
  }

 private:
  // Elements with one index.
  size_t unit() const { return kGroups ? group_ : 1; }

  [[gnu::always_inline]] void add(const void* values, size_t at, uint32_t i) {
    const auto value = [&](size_t t) __attribute__((always_inline)) {
      return static_cast<Real>(cpu::load<kValue>(values, at * unit() + t));
    };
    const bool first = slots_[i] == 0;
    const size_t slot = first ? touched_ : slots_[i] - 1u;
    Real* const sums = &sums_[slot * unit()];
    places_[touched_] = i;
    touched_ += first;
    slots_[i] = static_cast<uint16_t>(slot + 1);
    if constexpr (!kGroups) {  // without a branch, which would be unpredictable
      *sums = first ? value(0) : *sums + value(0);
    } else if (first) {
      each_below(unit(), [&](size_t t) __attribute__((always_inline)) { sums[t] = value(t); });
    } else {
      each_below(unit(), [&](size_t t) __attribute__((always_inline)) { sums[t] += value(t); });
    }
  }

  std::span<const codec::Packet> packets_;
  size_t group_;
  std::vector<size_t> next_;
  size_t touched_ = 0, count_ = 0;
  std::array<uint16_t, kRange> slots_{};       // of the sum of an index, + 1; 0: it has none
  std::array<uint32_t, kRange + 1> places_;    // the index of each sum
  alignas(64) std::array<Real, kRange> sums_;  // of those that there are, one after the other
};

// What is done with the sums of a range: out = factor * sum, and 0 without a sum.
template <Dtype kDtype>
struct StoreSums {
  using Real = RealOf<kDtype>;
  Real factor;

  template <typename Sums>
  [[gnu::always_inline]] void operator()(std::byte* at, size_t count, Sums* sums) const {
    std::memset(at, 0, count * bytes_of(kDtype));
    sums->each([at, factor = factor](size_t i, Real sum)
                   __attribute__((always_inline)) { cpu::store<kDtype>(at, i, factor * sum); });
  }
};

// param = fma(-lr, factor * sum, param), only where there is a sum.
template <Dtype kDtype>
struct ApplySums {
  using Real = RealOf<kDtype>;
  Real lr, factor;

  template <typename Sums>
  [[gnu::always_inline]] void operator()(std::byte* at, size_t, Sums* sums) const {
    sums->each([at, lr = lr, factor = factor](size_t i, Real sum) __attribute__((always_inline)) {
      cpu::store<kDtype>(at, i, std::fma(-lr, factor * sum, cpu::load<kDtype>(at, i)));
    });
  }
};

template <typename Sums, typename F>
struct ProcessRange {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(Sums* sums, const Ranges::IndexRange* range, size_t bytes,
                                         const F* f) {
    auto* const array = static_cast<std::byte*>(range->array.data) + range->begin * bytes;
    sums->add_up(*range, array, bytes);
    (*f)(array, range->count, sums);
  }
};

// Calls f(first element, count, sums) for each range. `packets` has
//   kRangesPerTask
//   kGroups                      see Sums
//   visit_values(g)              calls g with the dtype of the values, a constant
//   with_packets(begin, end, g)  calls g with packets that have the elements in begin..end-1; they
//                                may have others, too
template <typename Real, typename Packets, typename F>
void for_each_range(const Chain& chain, const Packets& packets, const F& f) {
  const Ranges ranges(chain, Packets::kRangesPerTask);
  const size_t bytes = bytes_of(chain.dtype);
  const cpu::Isa isa = cpu::isa_here();
  packets.visit_values([&](auto value) {
    using Here = Sums<Real, value(), Packets::kGroups>;
    parallel(ranges.tasks(), [&](size_t task) {
      const cpu::ExactFloats exact;
      const auto own = ranges.of_task(task);
      const size_t begin = own.front().first, end = own.back().first + own.back().count;
      packets.with_packets(begin, end, [&](std::span<const codec::Packet> here) {
        Here sums(here, begin, chain.group);
        for (const auto& range : own)
          cpu::run_on<ProcessRange<Here, F>>(isa, &sums, &range, bytes, &f);
      });
    });
  });
}

template <typename Packets>
void store_sums(const Chain& out, const Packets& packets, double scale) {
  visit_float(out.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    for_each_range<Real>(out, packets, StoreSums<dtype()>{static_cast<Real>(scale)});
  });
}

template <typename Packets>
void apply_sums(const Chain& param, const Packets& packets, DeviceKernels::Update update) {
  visit_float(param.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const ApplySums<dtype()> apply{static_cast<Real>(update.lr), static_cast<Real>(update.scale)};
    for_each_range<Real>(param, packets, apply);
  });
}

}  // namespace pycomm::kernels
