// Host code of groups of neighbours.
#include <algorithm>
#include <bit>
#include <span>
#include <vector>

#include "cuda/compact.hpp"
#include "cuda/cuda_kernels.h"
#include "cuda/groups.cuh"
#include "cuda/host.hpp"
#include "cuda/layout.hpp"

namespace pycomm::cuda {
namespace {

// The table of tensors, and the parts of the workspace of a call.
struct Plan {
  std::vector<GroupPiece> pieces;
  GroupTables tables{};
  Writing writing{};
  kernels::Workspace topk;
  float* sizes = nullptr;  // of the selected groups

  size_t lay_out(CudaGroupKernels& kernels, const kernels::GroupCounts& counts, void* workspace) {
    BumpAllocator allocator(workspace);
    allocator.take(tables.pieces, counts.tensors);
    allocator.take(tables.places, counts.tensors);
    allocator.take(tables.value_count, 1);
    allocator.take(tables.sizes, counts.groups);
    allocator.take(sizes, counts.k);
    topk.bytes = kernels.topk_workspace_bytes(counts.groups, counts.k, Dtype::float32);
    std::byte* parts = nullptr;
    allocator.take(parts, topk.bytes);
    topk.data = parts;
    allocator.take(parts, cuda::lay_out(writing, counts.k, nullptr));
    cuda::lay_out(writing, counts.k, parts);
    return allocator.bytes();
  }
  // The k largest groups; `found` are their sizes.
  kernels::DeviceKernels::TopK largest(int32_t* indices, float* found) const {
    return {.k = tables.k,
            .indices = indices,
            .values = found,
            .threshold = nullptr,
            .workspace = topk};
  }
};

// fill(piece, row) sets the addresses.
template <class Piece, class Fill>
Plan plan_of(std::span<const Piece> pieces, size_t group, size_t k, Fill fill) {
  Plan plan;
  size_t elements = 0, groups = 0, runs = 0;
  for (const Piece& piece : pieces) {
    GroupPiece made{};
    fill(piece, made);
    made.count = static_cast<unsigned>(piece.count);
    made.first = static_cast<unsigned>(elements);
    made.first_group = static_cast<unsigned>(groups);
    made.first_run = static_cast<unsigned>(runs);
    elements += piece.count;
    groups += kernels::groups_in(piece.count, group);
    runs += kernels::groups_in(piece.count, kRun);
    plan.pieces.push_back(made);
  }
  GroupTables& t = plan.tables;
  t.piece_count = static_cast<unsigned>(pieces.size());
  t.groups = static_cast<unsigned>(groups);
  t.runs = static_cast<unsigned>(runs);
  t.k = static_cast<unsigned>(k);
  t.bits = static_cast<unsigned>(std::countr_zero(group));
  return plan;
}

Plan plan_of(std::span<const kernels::Array> tensors, size_t group, size_t k) {
  return plan_of(tensors, group, k, [](const kernels::Array& x, GroupPiece& to) {
    to.residual = static_cast<float*>(x.data);
    to.aligned = is_aligned(x.data, 16);
  });
}

void store_table(const Plan& plan, cudaStream_t stream) {
  for (size_t first = 0; first < plan.pieces.size(); first += GroupPage::kMost) {
    GroupPage page{};
    page.first = static_cast<unsigned>(first);
    page.count =
        static_cast<unsigned>(std::min<size_t>(GroupPage::kMost, plan.pieces.size() - first));
    std::copy_n(plan.pieces.begin() + static_cast<std::ptrdiff_t>(first), page.count, page.of);
    launch("store_pieces", store_pieces, {1, kRunThreads, stream}, plan.tables, page);
  }
}

void open(Plan& plan, CudaGroupKernels& kernels, kernels::Workspace workspace,
          cudaStream_t stream) {
  const kernels::GroupCounts counts{plan.pieces.size(), plan.tables.groups, plan.tables.k};
  check(plan.lay_out(kernels, counts, workspace.data) <= workspace.bytes,
        "groups: the workspace is too small");
  store_table(plan, stream);
}

gpu::Launch for_runs(const GroupTables& t, cudaStream_t stream) {
  return {blocks_for(size_t{t.runs} * kRunThreads, kRunThreads), kRunThreads, stream};
}
gpu::Launch for_values(const GroupTables& t, cudaStream_t stream) {
  return {blocks_for(size_t{t.k} << t.bits, kRunThreads), kRunThreads, stream};
}

// Packets to decode, and where they are decoded.
struct PacketRows {
  std::vector<Reading> readings;
  std::vector<Expansion> expansions;

  // Places them, and the table of tensors, in the workspace, and returns the size.
  size_t lay_out(GroupTables& tables, const kernels::GroupDecoding& decoding) {
    BumpAllocator allocator(decoding.workspace.data);
    allocator.take(tables.pieces, decoding.counts.size());
    for (const kernels::GroupPacket& packet : decoding.packets) {
      Reading& r = readings.emplace_back();
      Expansion& e = expansions.emplace_back();
      std::byte* part = nullptr;
      allocator.take(part, cuda::lay_out(r, packet.k, packet.size, nullptr));
      cuda::lay_out(r, packet.k, packet.size, part);
      allocator.take(r.indices, packet.k);
      allocator.take(e.places, decoding.counts.size());
    }
    return allocator.bytes();
  }
};

template <class Packets>
void expand(const GroupTables& t, std::span<const Expansion> rows, cudaStream_t stream) {
  Packets packets{};
  std::ranges::copy(rows, packets.of);
  size_t most = 0;
  for (const Expansion& row : rows) most = std::max<size_t>(most, row.value_count);
  const auto count = static_cast<unsigned>(rows.size());
  launch("place_packets", place_packets<Packets>, {1, kTableThreads, stream, 0, count}, t, packets);
  launch("expand_groups", expand_groups<Packets>,
         {blocks_for(most, kRunThreads), kRunThreads, stream, 0, count}, t, packets);
}

// As with_float, without float64.
template <class F>
void with_parameter(Dtype dtype, F f) {
  with_float(dtype, [&](auto type) {
    if constexpr (!std::is_same_v<typename decltype(type)::type, double>) f(type);
  });
}

}  // namespace

void CudaGroupKernels::update_step(const kernels::UpdateStep& step, kernels::Queue queue) {
  const OnDevice on(queue);
  cudaStream_t const stream = stream_of(queue);
  const size_t bytes = bytes_of(step.dtype);
  const auto fill = [&](const kernels::UpdatePiece& piece, GroupPiece& to) {
    to.theta = piece.theta;
    to.param = piece.param;
    to.residual = piece.residual;
    to.aligned = is_aligned(piece.theta, 4 * bytes) && is_aligned(piece.param, 4 * bytes) &&
                 is_aligned(piece.residual, 16);
  };
  Plan plan = plan_of(step.pieces, step.group, step.k, fill);
  open(plan, *this, step.workspace, stream);
  GroupTables& t = plan.tables;
  t.indices = step.indices;
  t.values = step.values;
  t.result = step.sizes;
  with_parameter(step.dtype, [&](auto type) {
    launch("measure_runs", measure_runs<typename decltype(type)::type, true>, for_runs(t, stream),
           t);
  });
  topk({t.sizes, t.groups, Dtype::float32}, plan.largest(step.indices, plan.sizes), queue);
  launch("place_groups", place_groups, {1, kTableThreads, stream}, t);
  launch("move_values", move_values<false>, for_values(t, stream), t, ~0u);

  Writing& w = plan.writing;
  w.indices = step.indices;
  w.out = reinterpret_cast<uint8_t*>(step.packet);
  w.bytes = step.sizes + 1;
  w.value_count = t.value_count;
  w.code = 3;
  describe(w, t.groups, step.value_code, codec::kGroupMagic);
  write_indices({&w, 1}, stream);
  launch("encode_values", encode_values,
         {blocks_for(step.k * step.group, kLevelled), kValueThreads, stream}, t, w);
}

void CudaGroupKernels::topk_groups(const kernels::GroupSelection& selection, kernels::Queue queue) {
  const OnDevice on(queue);
  cudaStream_t const stream = stream_of(queue);
  Plan plan = plan_of(selection.tensors, selection.group, selection.k);
  open(plan, *this, selection.workspace, stream);
  const GroupTables& t = plan.tables;
  launch("measure_runs", measure_runs<float, false>, for_runs(t, stream), t);
  topk({t.sizes, t.groups, Dtype::float32}, plan.largest(selection.indices, selection.sizes),
       queue);
}

void CudaGroupKernels::write_groups(const kernels::GroupValues& values, kernels::Queue queue) {
  const OnDevice on(queue);
  cudaStream_t const stream = stream_of(queue);
  Plan plan = plan_of(values.tensors, values.group, values.indices.size());
  open(plan, *this, values.workspace, stream);
  GroupTables& t = plan.tables;
  t.indices = values.indices.data();
  t.values = const_cast<float*>(values.values.data());
  launch("place_groups", place_groups, {1, kTableThreads, stream}, t);
  launch("move_values", move_values<true>, for_values(t, stream), t,
         static_cast<unsigned>(values.values.size()));
}

void CudaGroupKernels::decode_groups(const kernels::GroupDecoding& decoding, kernels::Queue queue) {
  const OnDevice on(queue);
  cudaStream_t const stream = stream_of(queue);
  std::vector<kernels::Array> tensors;
  for (const uint64_t count : decoding.counts) tensors.push_back({nullptr, count});
  Plan plan = plan_of(tensors, decoding.group, 0);
  GroupTables& t = plan.tables;
  PacketRows rows;
  check(rows.lay_out(t, decoding) <= decoding.workspace.bytes,
        "decode_groups: the workspace is too small");
  store_table(plan, stream);
  size_t first = 0;
  for (size_t i = 0; i < decoding.packets.size(); ++i) {
    const kernels::GroupPacket& packet = decoding.packets[i];
    Reading& r = rows.readings[i];
    Expansion& e = rows.expansions[i];
    describe(r, {packet.bytes, packet.size}, t.groups, packet.values);
    r.values = decoding.values + first;
    r.refused = decoding.refused + i;
    e.groups = r.indices;
    e.elements = decoding.elements + first;
    e.values = r.values;
    e.refused = r.refused;
    e.k = r.k;
    e.value_count = r.value_count;
    first += packet.values;
  }
  read_packets(rows.readings, stream);
  for_each_launch<FewExpansions, ManyExpansions>(
      std::span<const Expansion>(rows.expansions), [&](auto type, std::span<const Expansion> some) {
        expand<typename decltype(type)::type>(t, some, stream);
      });
}

size_t CudaGroupKernels::group_decoding_bytes(const kernels::GroupDecoding& decoding) {
  kernels::GroupDecoding sized = decoding;
  sized.workspace = {};
  GroupTables tables{};
  return PacketRows().lay_out(tables, sized);
}

size_t CudaGroupKernels::group_workspace_bytes(const kernels::GroupCounts& most) {
  return Plan().lay_out(*this, most, nullptr);
}

}  // namespace pycomm::cuda
