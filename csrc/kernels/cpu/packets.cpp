// Packets on the CPU: check, sum, apply, write.
#include <cstring>
#include <string>

#include "codec/cpu/indices.h"
#include "codec/packet.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/sums.h"

namespace pycomm::kernels {
namespace {

// Converts a value to the sum type `Real`.
template <typename Real, Dtype kDtype>
Real value_at(const void* values, size_t i) {
  return static_cast<Real>(cpu::load<kDtype>(values, i));
}

// Packets of elements for sums.h.
class ElementPackets {
 public:
  static constexpr size_t kRangesPerTask = 32;
  static constexpr bool kGroups = false;

  // Throws InvalidArgument unless indices ascend within the arrays.
  ElementPackets(const Chain& chain, std::span<const codec::Packet> packets, Dtype value_dtype)
      : packets_(packets), value_dtype_(value_dtype) {
    size_t count = 0;
    for (const Array& array : chain.arrays)
      count += groups_in(array.count, chain.group) * chain.group;
    for (const codec::Packet& packet : packets)
      codec::check_indices({packet.indices, packet.count}, count);
  }
  template <typename F>
  void visit_values(F&& f) const {
    visit_float(value_dtype_, f);
  }
  template <typename F>
  void with_packets(size_t, size_t, F&& f) const {
    f(packets_);
  }

 private:
  std::span<const codec::Packet> packets_;
  Dtype value_dtype_;
};

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
  store_sums(out, ElementPackets(out, packets, value_dtype), scale);
}

void CpuKernels::decode_update(const Chain& param, std::span<const codec::Packet> packets,
                               Dtype value_dtype, Update update, Queue) {
  apply_sums(param, ElementPackets(param, packets, value_dtype), update);
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
