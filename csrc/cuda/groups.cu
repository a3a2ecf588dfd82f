// Host code of groups of neighbours.
#include <algorithm>
#include <bit>
#include <span>

#include "cuda/cuda_kernels.h"
#include "cuda/groups.cuh"
#include "cuda/groups.hpp"
#include "cuda/host.hpp"
#include "cuda/layout.hpp"

namespace pycomm::cuda {
namespace {

// fill(piece, row) sets the addresses.
template <class Piece, class Fill>
GroupPlan plan_with(std::span<const Piece> pieces, size_t group, Fill fill) {
  GroupPlan plan;
  size_t groups = 0, runs = 0;
  for (const Piece& piece : pieces) {
    GroupPiece made{};
    fill(piece, made);
    made.count = static_cast<unsigned>(piece.count);
    made.first_group = static_cast<unsigned>(groups);
    made.first_run = static_cast<unsigned>(runs);
    groups += kernels::groups_in(piece.count, group);
    runs += kernels::groups_in(piece.count, kRun);
    plan.pieces.push_back(made);
  }
  GroupTables& t = plan.tables;
  t.piece_count = static_cast<unsigned>(pieces.size());
  t.groups = static_cast<unsigned>(groups);
  t.runs = static_cast<unsigned>(runs);
  t.bits = static_cast<unsigned>(std::countr_zero(group));
  return plan;
}

// The parts of a workspace.
struct Parts {
  kernels::Workspace topk;

  size_t lay_out(CudaGroupKernels& kernels, const kernels::GroupCounts& counts, GroupTables& tables,
                 void* workspace) {
    BumpAllocator allocator(workspace);
    allocator.take(tables.pieces, counts.tensors);
    allocator.take(tables.sizes, counts.groups);
    topk.bytes = kernels.topk_workspace_bytes(counts.groups, counts.k, Dtype::float32);
    std::byte* part = nullptr;
    allocator.take(part, topk.bytes);
    topk.data = part;
    return allocator.bytes();
  }
};

Parts open(GroupPlan& plan, CudaGroupKernels& kernels, size_t k, kernels::Workspace workspace,
           cudaStream_t stream) {
  Parts parts;
  const kernels::GroupCounts counts{plan.pieces.size(), plan.tables.groups, k};
  check(parts.lay_out(kernels, counts, plan.tables, workspace.data) <= workspace.bytes,
        "groups: the workspace is too small");
  store_table(plan, stream);
  return parts;
}

// Calls measure(tables, shape), which writes the sizes of all groups, and selects the largest.
template <class Measure>
void select_groups(GroupPlan& plan, CudaGroupKernels& kernels,
                   const kernels::LargestGroups& largest, kernels::Queue queue, Measure measure) {
  cudaStream_t const stream = stream_of(queue);
  const Parts parts = open(plan, kernels, largest.k, largest.workspace, stream);
  const GroupTables& t = plan.tables;
  measure(t,
          gpu::Launch{blocks_for(size_t{t.runs} * kRunThreads, kRunThreads), kRunThreads, stream});
  kernels.topk({t.sizes, t.groups, Dtype::float32},
               {.k = largest.k,
                .indices = largest.indices,
                .values = largest.sizes,
                .threshold = nullptr,
                .workspace = parts.topk},
               queue);
}

template <Move kMove>
void move(const GroupTables& t, std::span<const Writing> rows, cudaStream_t stream) {
  for_each_launch<FewWritings, ManyWritings>(rows, [&](auto type, std::span<const Writing> some) {
    using Packets = typename decltype(type)::type;
    size_t most = 0;
    for (const Writing& w : some) most = std::max<size_t>(most, w.value_count);
    launch<move_values<kMove, Packets>>(
        "move_values",
        {blocks_for(most, kRunThreads), kRunThreads, stream, 0, static_cast<unsigned>(some.size())},
        t, packets_of<Packets>(some));
  });
}

// As with_float, without float64.
template <class F>
void with_parameter(Dtype dtype, F f) {
  with_float(dtype, [&](auto type) {
    if constexpr (!std::is_same_v<typename decltype(type)::type, double>) f(type);
  });
}

}  // namespace

GroupPlan plan_of(std::span<const kernels::Array> tensors, size_t group) {
  return plan_with(tensors, group, [](const kernels::Array& x, GroupPiece& to) {
    to.residual = static_cast<float*>(x.data);
    to.aligned = is_aligned(x.data, 16);
  });
}

void store_table(const GroupPlan& plan, cudaStream_t stream) {
  for (size_t first = 0; first < plan.pieces.size(); first += GroupPage::kMost) {
    GroupPage page{};
    page.first = static_cast<unsigned>(first);
    page.count =
        static_cast<unsigned>(std::min<size_t>(GroupPage::kMost, plan.pieces.size() - first));
    std::copy_n(plan.pieces.begin() + static_cast<std::ptrdiff_t>(first), page.count, page.of);
    launch<store_pieces>("store_pieces", {1, kRunThreads, stream}, plan.tables, page);
  }
}

void take_values(const GroupTables& tables, std::span<const Writing> rows, cudaStream_t stream) {
  move<Move::take>(tables, rows, stream);
}

void leave_errors(const GroupTables& tables, std::span<const Writing> rows, cudaStream_t stream) {
  move<Move::leave>(tables, rows, stream);
}

void CudaGroupKernels::update_step(std::span<const kernels::UpdatePiece> pieces, Dtype dtype,
                                   const kernels::LargestGroups& largest, kernels::Queue queue) {
  const OnDevice on(queue);
  const size_t bytes = bytes_of(dtype);
  const auto fill = [&](const kernels::UpdatePiece& piece, GroupPiece& to) {
    to.theta = piece.theta;
    to.param = piece.param;
    to.residual = piece.residual;
    to.aligned = is_aligned(piece.theta, 4 * bytes) && is_aligned(piece.param, 4 * bytes) &&
                 is_aligned(piece.residual, 16);
  };
  GroupPlan plan = plan_with(pieces, largest.group, fill);
  select_groups(plan, *this, largest, queue, [&](const GroupTables& t, const gpu::Launch& shape) {
    with_parameter(dtype, [&](auto type) {
      launch<measure_runs<typename decltype(type)::type, true>>("measure_runs", shape, t);
    });
  });
}

void CudaGroupKernels::topk_groups(std::span<const kernels::Array> tensors,
                                   const kernels::LargestGroups& largest, kernels::Queue queue) {
  const OnDevice on(queue);
  GroupPlan plan = plan_of(tensors, largest.group);
  select_groups(plan, *this, largest, queue, [](const GroupTables& t, const gpu::Launch& shape) {
    launch<measure_runs<float, false>>("measure_runs", shape, t);
  });
}

void CudaGroupKernels::write_groups(const kernels::GroupValues& values, kernels::Queue queue) {
  const OnDevice on(queue);
  cudaStream_t const stream = stream_of(queue);
  GroupPlan plan = plan_of(values.tensors, values.group);
  open(plan, *this, values.indices.size(), values.workspace, stream);
  Writing w{};
  w.indices = values.indices.data();
  w.values = const_cast<float*>(values.values);  // read only
  w.value_count = static_cast<unsigned>(values.indices.size() * values.group);
  move<Move::restore>(plan.tables, {&w, 1}, stream);
}

size_t CudaGroupKernels::group_workspace_bytes(const kernels::GroupCounts& most) {
  GroupTables tables{};
  return Parts().lay_out(*this, most, tables, nullptr);
}

}  // namespace pycomm::cuda
