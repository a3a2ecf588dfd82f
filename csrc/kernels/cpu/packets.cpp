// Packets on the processor: checked, added up, applied, written. One pass in index order over
// ranges of 16384 elements: each range keeps its sums and a bit for each element that has one, so
// every touched cache line of the parameters is visited once, whatever the number of packets.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/floats.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"
#include "kernels/packet.h"

namespace pycomm::cpu {
namespace {

constexpr size_t kRange = 16384;

void check_indices(std::span<const int32_t> indices, size_t count) {
  int64_t before = -1;
  bool good = true;
  for (const int32_t index : indices) {
    good &= index > before;
    before = index;
  }
  if (good && before < static_cast<int64_t>(count)) return;
  before = -1;
  for (size_t i = 0; i < indices.size(); before = indices[i++])
    if (indices[i] <= before || indices[i] >= static_cast<int64_t>(count))
      throw InvalidArgument("index " + std::to_string(indices[i]) + " at place " +
                            std::to_string(i) + ": indices ascend and lie in 0.." +
                            std::to_string(static_cast<int64_t>(count) - 1));
}

// A value on its way into a sum of `Real`.
template <typename Real, Dtype kDtype>
Real value_at(const void* values, size_t i) {
  return static_cast<Real>(load<kDtype>(values, i));
}

template <Dtype kDtype>
using RealOf = std::conditional_t<kDtype == Dtype::float64, double, float>;

// One array of a chain, and where its first element stands in it.
struct Link {
  Array array;
  size_t first;
};

struct Range {
  size_t link;
  size_t begin;  // in the array
  size_t count;
};

class Chained {
 public:
  explicit Chained(std::span<const Array> arrays) {
    for (const Array& array : arrays) {
      for (size_t begin = 0; begin < array.count; begin += kRange)
        ranges_.push_back({links_.size(), begin, std::min(kRange, array.count - begin)});
      links_.push_back({array, count_});
      count_ += array.count;
    }
  }
  size_t count() const { return count_; }
  const std::vector<Range>& ranges() const { return ranges_; }
  const Link& link(const Range& range) const { return links_[range.link]; }

 private:
  std::vector<Link> links_;
  std::vector<Range> ranges_;
  size_t count_ = 0;
};

// Sums of what packets have for one range.
template <typename Real>
class Sums {
 public:
  template <Dtype kValue>
  void add(const Packet& packet, size_t first, size_t count) {
    const std::span<const int32_t> indices(packet.indices, packet.count);
    auto at = std::lower_bound(indices.begin(), indices.end(), static_cast<int64_t>(first));
    const auto end = static_cast<int64_t>(first + count);
    for (; at != indices.end() && *at < end; ++at) {
      const size_t i = static_cast<size_t>(*at) - first;
      const Real value =
          value_at<Real, kValue>(packet.values, static_cast<size_t>(at - indices.begin()));
      uint64_t& word = there_[i / 64];
      const uint64_t bit = uint64_t{1} << i % 64;
      sums_[i] = (word & bit) != 0 ? sums_[i] + value : value;
      word |= bit;
    }
  }

  // f(i, sum) for each element that has one, ascending.
  template <typename F>
  void each(F&& f) const {
    for (size_t w = 0; w < there_.size(); ++w)
      for (uint64_t word = there_[w]; word != 0; word &= word - 1) {
        const size_t i = 64 * w + static_cast<size_t>(std::countr_zero(word));
        f(i, sums_[i]);
      }
  }

 private:
  std::array<uint64_t, kRange / 64> there_{};
  std::array<Real, kRange> sums_;  // only where there_ says so
};

// f(array, begin, count, sums) for each range of the chain.
template <typename Real, typename F>
void for_each_range(const Chain& chain, std::span<const Packet> packets, Dtype value_dtype, F&& f) {
  const Chained chained(chain.arrays);
  for (const Packet& packet : packets)
    check_indices({packet.indices, packet.count}, chained.count());
  with_float(value_dtype, [&](auto value) {
    parallel(chained.ranges().size(), [&](size_t r) {
      const ExactFloats exact;
      const Range& range = chained.ranges()[r];
      const Link& link = chained.link(range);
      Sums<Real> sums;
      for (const Packet& packet : packets)
        sums.template add<value()>(packet, link.first + range.begin, range.count);
      f(link.array, range.begin, range.count, sums);
    });
  });
}

// f(index in its array, place in the packet, the piece) for each index of a selection.
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
    check_indices({selection.indices, selection.k}, count);
    if (selection.k > 0 && static_cast<size_t>(selection.indices[0]) < selection.first)
      throw InvalidArgument("index " + std::to_string(selection.indices[0]) +
                            " belongs to an array before its own");
  }
}

}  // namespace

void CpuKernels::dgc_rollback(const DgcTables& tables, const float* found_inf, Queue) {
  if (found_inf != nullptr && *found_inf != 0) return;
  check_selections(tables);
  with_real(tables.dtype, [&](auto dtype) {
    using Real = Stored<dtype()>;
    for_each_chosen(tables, [](const DgcSelection& from, size_t i, const DgcPiece& to, size_t at) {
      static_cast<Real*>(to.v)[at] = static_cast<const Real*>(from.values)[i];
      static_cast<Real*>(to.u)[at] = static_cast<const Real*>(from.u_values)[i];
    });
  });
}

void CpuKernels::momentum_mask(void* u, void* v, const Positions& where, Queue) {
  check_indices(where.indices, where.count);
  with_real(where.dtype, [&](auto dtype) {
    for (void* const array : {u, v})
      if (array != nullptr)
        for (const int32_t index : where.indices) static_cast<Stored<dtype()>*>(array)[index] = 0;
  });
}

void CpuKernels::scatter_add(TypedArray out, const Packet& packet, Dtype value_dtype, double scale,
                             Queue) {
  check_indices({packet.indices, packet.count}, out.count);
  const ExactFloats exact;
  with_float(out.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto factor = static_cast<Real>(scale);
    with_float(value_dtype, [&](auto value) {
      for (size_t i = 0; i < packet.count; ++i) {
        const auto at = static_cast<size_t>(packet.indices[i]);
        const Real product = factor * value_at<Real, value()>(packet.values, i);
        store<dtype()>(out.data, at, load<dtype()>(out.data, at) + product);
      }
    });
  });
}

void CpuKernels::decode_sum(const Chain& out, std::span<const Packet> packets, Dtype value_dtype,
                            double scale, Queue) {
  with_float(out.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto factor = static_cast<Real>(scale);
    for_each_range<Real>(
        out, packets, value_dtype,
        [&](const Array& array, size_t begin, size_t count, const auto& sums) {
          constexpr size_t kBytes = bytes_of(dtype());
          auto* const at = static_cast<std::byte*>(array.data) + begin * kBytes;
          std::memset(at, 0, count * kBytes);
          sums.each([&](size_t i, Real sum) { store<dtype()>(at, i, factor * sum); });
        });
  });
}

void CpuKernels::decode_update(const Chain& param, std::span<const Packet> packets,
                               Dtype value_dtype, Update update, Queue) {
  with_float(param.dtype, [&](auto dtype) {
    using Real = RealOf<dtype()>;
    const auto lr = static_cast<Real>(update.lr), factor = static_cast<Real>(update.scale);
    for_each_range<Real>(
        param, packets, value_dtype,
        [&](const Array& array, size_t begin, size_t, const auto& sums) {
          auto* const at = static_cast<std::byte*>(array.data) + begin * bytes_of(dtype());
          sums.each([&](size_t i, Real sum) {
            store<dtype()>(at, i, std::fma(-lr, factor * sum, load<dtype()>(at, i)));
          });
        });
  });
}

void CpuKernels::encode(const Packet& packet, const Encoding& encoding, Queue) {
  check_indices({packet.indices, packet.count}, encoding.count);
  const ExactFloats exact;
  const PacketHeader header{
      .k = packet.count, .count = encoding.count, .value_dtype = encoding.value_dtype};
  std::memcpy(encoding.out, &header, sizeof header);
  std::byte* const values = encoding.out + kPacketHeaderBytes;
  std::byte* const indices = encoding.out + raw_indices_offset(packet.count, encoding.value_dtype);
  with_real(encoding.dtype, [&](auto dtype) {
    with_float(encoding.value_dtype, [&](auto sent) {
      using Real = Stored<dtype()>;
      auto* const residual = static_cast<Real*>(encoding.residual);
      for (size_t i = 0; i < packet.count; ++i) {
        const Real value = static_cast<const Real*>(packet.values)[i];
        store_rounded<sent()>(values, i, value);
        if (residual == nullptr) continue;
        Real& rest = residual[packet.indices[i]];
        rest = with_one_nan(rest + (value - value_at<Real, sent()>(values, i)));
      }
      const size_t end = packet.count * bytes_of(sent());
      std::memset(values + end, 0, static_cast<size_t>(indices - values) - end);
    });
  });
  if (packet.count > 0) std::memcpy(indices, packet.indices, packet.count * sizeof(int32_t));
}

}  // namespace pycomm::cpu
