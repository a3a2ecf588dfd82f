// Packets on the CPU: check, sum, apply, write. One pass in index order over ranges of 16384
// elements. Each range keeps its sums and a flag per element with a value, so each touched cache
// line of the parameters is visited once for any number of packets. Neighbours are summed and
// applied as vectors: packets of groups consist of them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec/cpu/indices.h"
#include "codec/packet.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kRange = 16384;
constexpr size_t kRangesPerTask = 32;
constexpr size_t kRun = 16;  // neighbours that are processed together

// Converts a value to the sum type `Real`.
template <typename Real, Dtype kDtype>
Real value_at(const void* values, size_t i) {
  return static_cast<Real>(cpu::load<kDtype>(values, i));
}

template <Dtype kDtype>
using RealOf = std::conditional_t<kDtype == Dtype::float64, double, float>;

// Concatenated arrays, split into runs of at most kRange elements of one array.
class Ranges {
 public:
  struct IndexRange {
    Array array;
    size_t begin;  // in the array
    size_t count;
    size_t first;  // of the range, in the concatenation
  };
  explicit Ranges(std::span<const Array> arrays) {
    for (const Array& array : arrays) {
      for (size_t begin = 0; begin < array.count; begin += kRange)
        ranges_.push_back({array, begin, std::min(kRange, array.count - begin), count_ + begin});
      count_ += array.count;
    }
  }
  size_t count() const { return count_; }  // elements
  size_t tasks() const { return (ranges_.size() + kRangesPerTask - 1) / kRangesPerTask; }
  std::span<const IndexRange> of_task(size_t task) const {
    const size_t first = task * kRangesPerTask;
    return std::span(ranges_).subspan(first, std::min(kRangesPerTask, ranges_.size() - first));
  }

 private:
  std::vector<IndexRange> ranges_;
  size_t count_ = 0;
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
      while (at < packet.count && packet.indices[at] < end) {
        const auto i = static_cast<uint32_t>(packet.indices[at] - first);
        // Indices ascend, so these two say that all between them are neighbours.
        const bool neighbours = at + kRun <= packet.count && i + kRun <= range.count &&
                                packet.indices[at + kRun - 1] - packet.indices[at] == kRun - 1;
        __builtin_prefetch(array + i * bytes, 1);
        if (neighbours && add_run(packet.values, at, i)) {
          __builtin_prefetch(array + (i + kRun - 1) * bytes, 1);
          at += kRun;
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
      for (uint32_t i = begin; i < begin + kRun; ++i) f(i, sums_[i]);
      std::memset(&there_[begin], 0, kRun);
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

  // Adds kRun values to neighbours if all of them have a sum, or none; returns whether.
  [[gnu::always_inline]] bool add_run(const void* values, size_t at, uint32_t i) {
    std::array<uint64_t, 2> there;
    static_assert(sizeof there == kRun);
    std::memcpy(&there, &there_[i], kRun);
    if ((there[0] | there[1]) == 0) {
      run_places_[runs_++] = i;
      std::memset(&there_[i], 1, kRun);
      for (size_t t = 0; t < kRun; ++t)
        sums_[i + t] = static_cast<Real>(cpu::load<kValue>(values, at + t));
      return true;
    }
    if ((there[0] & there[1]) != 0x0101'0101'0101'0101) return false;
    for (size_t t = 0; t < kRun; ++t)
      sums_[i + t] += static_cast<Real>(cpu::load<kValue>(values, at + t));
    return true;
  }

  std::span<const codec::Packet> packets_;
  std::vector<size_t> next_;
  size_t touched_ = 0, runs_ = 0;
  std::array<uint32_t, kRange + 1> places_;         // of single elements with a sum
  std::array<uint32_t, kRange / kRun> run_places_;  // the first elements of kRun with sums
  std::array<uint8_t, kRange> there_{};             // 1: the element has a sum
  std::array<Real, kRange> sums_;
};

// Sums a range and calls f(first element, count, sums).
template <typename Real, Dtype kValue, typename F>
struct ProcessRange {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(Sums<Real, kValue>* sums, const Ranges::IndexRange* range,
                                         size_t bytes, F* f) {
    auto* const array = static_cast<std::byte*>(range->array.data) + range->begin * bytes;
    sums->add_up(*range, array, bytes);
    (*f)(array, range->count, *sums);
  }
};

// Calls f(first element of the range, its count, sums) for each range.
template <typename Real, typename F>
void for_each_range(const Chain& chain, std::span<const codec::Packet> packets, Dtype value_dtype,
                    F f) {
  const Ranges ranges(chain.arrays);
  for (const codec::Packet& packet : packets)
    codec::check_indices({packet.indices, packet.count}, ranges.count());
  const size_t bytes = bytes_of(chain.dtype);
  const cpu::Isa isa = cpu::isa_here();
  visit_float(value_dtype, [&](auto value) {
    parallel(ranges.tasks(), [&](size_t task) {
      const cpu::ExactFloats exact;
      const auto own = ranges.of_task(task);
      Sums<Real, value()> sums(packets, own[0].first);
      for (const auto& range : own)
        cpu::run_on<ProcessRange<Real, value(), F>>(isa, &sums, &range, bytes, &f);
    });
  });
}

// Calls f(index in its array, position in the packet, the piece) for each index of a selection.
template <typename F>
void for_each_chosen(const DgcTables& tables, F&& f) {
  size_t next = 0;
  for (const auto& selection : tables.selections) {
    const auto pieces = tables.pieces.subspan(next, selection.pieces);
    next += selection.pieces;
    size_t piece = 0, begin = selection.first;
    for (size_t i = 0; i < selection.k; ++i) {
      const auto index = static_cast<size_t>(selection.indices[i]);
      while (index >= begin + pieces[piece].count) begin += pieces[piece++].count;
      f(selection, i, pieces[piece], index - begin);
    }
  }
}

void check_selections(const DgcTables& tables) {
  size_t next = 0;
  for (const auto& selection : tables.selections) {
    size_t count = selection.first;
    for (const auto& piece : tables.pieces.subspan(next, selection.pieces)) count += piece.count;
    next += selection.pieces;
    codec::check_indices({selection.indices, selection.k}, count);
    if (selection.k > 0 && static_cast<size_t>(selection.indices[0]) < selection.first)
      throw InvalidArgument("index " + std::to_string(selection.indices[0]) +
                            " is below the first index of its selection");
  }
}

}  // namespace

void CpuKernels::dgc_rollback(const DgcTables& tables, const float* found_inf, Queue) {
  if (found_inf != nullptr && *found_inf != 0) return;
  check_selections(tables);
  visit_real(tables.dtype, [&](auto dtype) {
    using Real = cpu::Stored<dtype()>;
    for_each_chosen(tables, [](const DgcSelection& from, size_t i, const DgcPiece& to, size_t at) {
      static_cast<Real*>(to.v)[at] = static_cast<const Real*>(from.values)[i];
      static_cast<Real*>(to.u)[at] = static_cast<const Real*>(from.u_values)[i];
    });
  });
}

void CpuKernels::momentum_mask(void* u, void* v, const Positions& where, Queue) {
  codec::check_indices(where.indices, where.count);
  visit_real(where.dtype, [&](auto dtype) {
    for (void* const array : {u, v})
      if (array != nullptr)
        for (const int32_t index : where.indices)
          static_cast<cpu::Stored<dtype()>*>(array)[index] = 0;
  });
}

void CpuKernels::scatter_add(TypedArray out, const codec::Packet& packet, Dtype value_dtype,
                             double scale, Queue) {
  codec::check_indices({packet.indices, packet.count}, out.count);
  const cpu::ExactFloats exact;
  visit_float(out.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto factor = static_cast<Real>(scale);
    visit_float(value_dtype, [&](auto value) {
      for (size_t i = 0; i < packet.count; ++i) {
        const auto at = static_cast<size_t>(packet.indices[i]);
        const Real product = factor * value_at<Real, value()>(packet.values, i);
        cpu::store<dtype()>(out.data, at, cpu::load<dtype()>(out.data, at) + product);
      }
    });
  });
}

void CpuKernels::decode_sum(const Chain& out, std::span<const codec::Packet> packets,
                            Dtype value_dtype, double scale, Queue) {
  visit_float(out.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto factor = static_cast<Real>(scale);
    for_each_range<Real>(out, packets, value_dtype,
                         [=](std::byte* at, size_t count, auto& sums)
                             __attribute__((always_inline)) {
                               std::memset(at, 0, count * bytes_of(dtype()));
                               sums.each([=](size_t i, Real sum) __attribute__((always_inline)) {
                                 cpu::store<dtype()>(at, i, factor * sum);
                               });
                             });
  });
}

void CpuKernels::decode_update(const Chain& param, std::span<const codec::Packet> packets,
                               Dtype value_dtype, Update update, Queue) {
  visit_float(param.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto lr = static_cast<Real>(update.lr), factor = static_cast<Real>(update.scale);
    for_each_range<Real>(param, packets, value_dtype,
                         [=](std::byte* at, size_t, auto& sums) __attribute__((always_inline)) {
                           sums.each([=](size_t i, Real sum) __attribute__((always_inline)) {
                             cpu::store<dtype()>(
                                 at, i, std::fma(-lr, factor * sum, cpu::load<dtype()>(at, i)));
                           });
                         });
  });
}

void CpuKernels::encode(const codec::Packet& packet, const Encoding& encoding, Queue) {
  codec::check_indices({packet.indices, packet.count}, encoding.count);
  const cpu::ExactFloats exact;
  const codec::PacketHeader header{
      .k = packet.count, .count = encoding.count, .value_dtype = encoding.value_dtype};
  std::memcpy(encoding.out, &header, sizeof header);
  std::byte* const values = encoding.out + codec::kPacketHeaderBytes;
  std::byte* const indices =
      encoding.out + codec::raw_indices_offset(packet.count, encoding.value_dtype);
  visit_real(encoding.dtype, [&](auto dtype) {
    visit_float(encoding.value_dtype, [&](auto sent) {
      using Real = cpu::Stored<dtype()>;
      auto* const residual = static_cast<Real*>(encoding.residual);
      for (size_t i = 0; i < packet.count; ++i) {
        const Real value = static_cast<const Real*>(packet.values)[i];
        cpu::store_rounded<sent()>(values, i, value);
        if (residual == nullptr) continue;
        Real& rest = residual[packet.indices[i]];
        rest = cpu::with_one_nan(rest + (value - value_at<Real, sent()>(values, i)));
      }
      const size_t end = packet.count * bytes_of(sent());
      std::memset(values + end, 0, static_cast<size_t>(indices - values) - end);
    });
  });
  if (packet.count > 0) std::memcpy(indices, packet.indices, packet.count * sizeof(int32_t));
}

}  // namespace pycomm::kernels
