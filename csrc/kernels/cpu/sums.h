// Sums of packets on the CPU, and what is done with them: one pass in index order over ranges of
// 16384 elements. Each range keeps its sums and a flag per element with a value, so each touched
// cache line of the target is visited once for any number of packets. Neighbours are summed and
// applied as vectors: packets of groups consist of them.
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
inline constexpr size_t kNeighbours = 16;  // neighbours that are processed together

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

// Sums the values of the packets for one range after another.
template <typename Real, Dtype kValue>
class Sums {
 public:
  Sums(std::span<const codec::Packet> packets, size_t first)
      : packets_(packets), next_(packets.size()) {
    for (size_t p = 0; p < packets.size(); ++p) {
      const std::span<const int32_t> indices(packets[p].indices, packets[p].count);
      const auto at = std::lower_bound(indices.begin(), indices.end(), static_cast<int64_t>(first));
      next_[p] = static_cast<size_t>(at - indices.begin());
    }
  }

  // `array`: the first element of the range, of `bytes` each.
  [[gnu::always_inline]] void add_up(const Ranges::IndexRange& range, const std::byte* array,
                                     size_t bytes) {
    touched_ = runs_ = 0;
    const auto first = static_cast<int64_t>(range.first), end = first + int64_t(range.count);
    for (size_t p = 0; p < packets_.size(); ++p) {
      const codec::Packet& packet = packets_[p];
      size_t at = next_[p];
      while (at < packet.count && packet.indices[at] < first) ++at;  // in no array
      while (at < packet.count && packet.indices[at] < end) {
        const auto i = static_cast<uint32_t>(packet.indices[at] - first);
        // Indices ascend, so these two say that all between them are neighbours.
        const bool neighbours =
            at + kNeighbours <= packet.count && i + kNeighbours <= range.count &&
            packet.indices[at + kNeighbours - 1] - packet.indices[at] == kNeighbours - 1;
        __builtin_prefetch(array + i * bytes, 1);
        if (neighbours && add_run(packet.values, at, i)) {
          __builtin_prefetch(array + (i + kNeighbours - 1) * bytes, 1);
          at += kNeighbours;
        } else {
          add_one(packet.values, at++, i);
        }
      }
      next_[p] = at;
    }
  }

  // Calls f(i, sum) for each element of the range with a sum.
  template <typename F>
  [[gnu::always_inline]] void each(F&& f) {
    for (size_t j = 0; j < runs_; ++j) {
      const uint32_t begin = run_places_[j];
#pragma GCC ivdep
      for (uint32_t i = begin; i < begin + kNeighbours; ++i) f(i, sums_[i]);
      std::memset(&there_[begin], 0, kNeighbours);
    }
    for (size_t j = 0; j < touched_; ++j) {
      const uint32_t i = places_[j];
      f(i, sums_[i]);
      there_[i] = 0;
    }
  }

 private:
  [[gnu::always_inline]] void add_one(const void* values, size_t at, uint32_t i) {
    const auto value = static_cast<Real>(cpu::load<kValue>(values, at));
    places_[touched_] = i;
    touched_ += !there_[i];
    sums_[i] = there_[i] ? sums_[i] + value : value;
    there_[i] = 1;
  }

  // Adds kNeighbours values to neighbours if all of them have a sum, or none; returns whether.
  [[gnu::always_inline]] bool add_run(const void* values, size_t at, uint32_t i) {
    std::array<uint64_t, 2> there;
    static_assert(sizeof there == kNeighbours);
    std::memcpy(&there, &there_[i], kNeighbours);
    if ((there[0] | there[1]) == 0) {
      run_places_[runs_++] = i;
      std::memset(&there_[i], 1, kNeighbours);
      for (size_t t = 0; t < kNeighbours; ++t)
        sums_[i + t] = static_cast<Real>(cpu::load<kValue>(values, at + t));
      return true;
    }
    if ((there[0] & there[1]) != 0x0101'0101'0101'0101) return false;
    for (size_t t = 0; t < kNeighbours; ++t)
      sums_[i + t] += static_cast<Real>(cpu::load<kValue>(values, at + t));
    return true;
  }

  std::span<const codec::Packet> packets_;
  std::vector<size_t> next_;
  size_t touched_ = 0, runs_ = 0;
  std::array<uint32_t, kRange + 1> places_;  // of single elements with a sum
  std::array<uint32_t, kRange / kNeighbours>
      run_places_;                       // the first elements of kNeighbours with sums
  std::array<uint8_t, kRange> there_{};  // 1: the element has a sum
  std::array<Real, kRange> sums_;
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

template <typename Real, Dtype kValue, typename F>
struct ProcessRange {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(Sums<Real, kValue>* sums, const Ranges::IndexRange* range,
                                         size_t bytes, const F* f) {
    auto* const array = static_cast<std::byte*>(range->array.data) + range->begin * bytes;
    sums->add_up(*range, array, bytes);
    (*f)(array, range->count, sums);
  }
};

// Calls f(first element, count, sums) for each range. `packets` has
//   kRangesPerTask
//   visit_values(g)              calls g with the dtype of the values, a constant
//   with_packets(begin, end, g)  calls g with packets that have the elements in begin..end-1; they
//                                may have others, too
template <typename Real, typename Packets, typename F>
void for_each_range(const Chain& chain, const Packets& packets, const F& f) {
  const Ranges ranges(chain, Packets::kRangesPerTask);
  const size_t bytes = bytes_of(chain.dtype);
  const cpu::Isa isa = cpu::isa_here();
  packets.visit_values([&](auto value) {
    parallel(ranges.tasks(), [&](size_t task) {
      const cpu::ExactFloats exact;
      const auto own = ranges.of_task(task);
      const size_t begin = own.front().first, end = own.back().first + own.back().count;
      packets.with_packets(begin, end, [&](std::span<const codec::Packet> here) {
        Sums<Real, value()> sums(here, begin);
        for (const auto& range : own)
          cpu::run_on<ProcessRange<Real, value(), F>>(isa, &sums, &range, bytes, &f);
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
