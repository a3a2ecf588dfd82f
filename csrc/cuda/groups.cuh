// Groups of neighbours on the device. kernels/groups.h has the formulas.
//
//   store_pieces   writes the table of tensors to the workspace
//   measure_runs   one pass over the tensors, a block per run of 1024 elements: the update, and the
//                  size of each group
//   topk           of the sizes (topk.cu)
//   move_values    the values of the selected groups, one after the other; or back
#pragma once

#include "cuda/compact_tables.cuh"
#include "cuda/groups.hpp"
#include "cuda/numbers.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kRun = 1024;  // elements; a multiple of every group
inline constexpr unsigned kRunThreads = kRun / 4;
inline constexpr unsigned kSpread = 128;  // elements of a warp

// Rows of the table: an argument, so that no host memory must outlive the call.
struct GroupPage {
  static constexpr unsigned kMost = 600;
  unsigned first, count;
  GroupPiece of[kMost];
};
static_assert(sizeof(GroupPage) + sizeof(GroupTables) <= 32764);

__global__ void __launch_bounds__(kRunThreads)
    store_pieces(const __grid_constant__ GroupTables t, const __grid_constant__ GroupPage page) {
  for (unsigned i = threadIdx.x; i < page.count; i += kRunThreads)
    t.pieces[page.first + i] = page.of[i];
}

// The last tensor whose number is at most x; number(i) ascends. Tensors without elements have the
// number of the next one.
template <class Number>
__device__ __forceinline__ unsigned last_piece(const GroupTables& t, unsigned x, Number number) {
  unsigned low = 0;
  for (unsigned count = t.piece_count; count > 1;) {
    const unsigned half = count / 2;
    const bool above = number(low + half) <= x;
    low += above ? half : 0;
    count = above ? count - half : half;
  }
  return low;
}
__device__ __forceinline__ unsigned piece_of_group(const GroupTables& t, unsigned group) {
  return last_piece(t, group, [&](unsigned i) { return t.pieces[i].first_group; });
}

struct RunSpace {
  float by_warp[kRunThreads / 32];
};

// Sums of squares that are added in pairs of neighbours.
__device__ __forceinline__ float pair(float a, float b) { return canonical(add(a, b)); }

// Writes the sizes of the groups of a run. Each thread has four neighbours; `left`: elements of the
// run.
__device__ __forceinline__ void store_sizes(const GroupTables& t, float* sizes, unsigned left,
                                            const float (&x)[4]) {
  float squares[4];
#pragma unroll
  for (unsigned e = 0; e < 4; ++e) squares[e] = canonical(multiply(x[e], x[e]));
  const unsigned first = 4 * threadIdx.x, group = 1u << t.bits;
  if (t.bits == 0) {
#pragma unroll
    for (unsigned e = 0; e < 4; ++e)
      if (first + e < left) sizes[first + e] = squares[e];
    return;
  }
  const float low = pair(squares[0], squares[1]), high = pair(squares[2], squares[3]);
  if (t.bits == 1) {
    if (first < left) sizes[first / 2] = low;
    if (first + 2 < left) sizes[first / 2 + 1] = high;
    return;
  }
  float sum = pair(low, high);
  for (unsigned width = 4; width < min(group, kSpread); width *= 2)
    sum = pair(sum, __shfl_xor_sync(gpu::kFullWarp, sum, static_cast<int>(width / 4)));
  if (group <= kSpread) {
    if (first % group == 0 && first < left) sizes[first >> t.bits] = sum;
    return;
  }
  auto& warps = gpu::shared<RunSpace>().by_warp;
  if (gpu::lane_id() == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  const unsigned each = group / kSpread;  // warps of a group: 2, 4 or 8
  if (threadIdx.x * group < kRun && threadIdx.x * group < left) {
    float sums[kRunThreads / 32];
    for (unsigned w = 0; w < each; ++w) sums[w] = warps[threadIdx.x * each + w];
    for (unsigned count = each / 2; count > 0; count /= 2)
      for (unsigned w = 0; w < count; ++w) sums[w] = pair(sums[2 * w], sums[2 * w + 1]);
    sizes[threadIdx.x] = sums[0];
  }
  __syncthreads();
}

// V: type of theta and param. kUpdates: adds the update to the residual; else it only reads.
template <class V, bool kUpdates>
__global__ void __launch_bounds__(kRunThreads) measure_runs(const __grid_constant__ GroupTables t) {
  for (unsigned run = blockIdx.x; run < t.runs; run += gridDim.x) {
    const GroupPiece& piece =
        t.pieces[last_piece(t, run, [&](unsigned i) { return t.pieces[i].first_run; })];
    const unsigned offset = (run - piece.first_run) * kRun;
    const unsigned left = min(kRun, piece.count - offset), first = 4 * threadIdx.x;
    float* const residual = piece.residual + offset;
    float x[4] = {0, 0, 0, 0};
    if (piece.aligned && first + 4 <= left) {
      Quad<float> sums = load_quad(residual + first);
      if constexpr (kUpdates) {
        const Quad<V> theta = load_quad(static_cast<const V*>(piece.theta) + offset + first);
        V* const param = static_cast<V*>(piece.param) + offset + first;
        const Quad<V> after = load_quad(static_cast<const V*>(param));
#pragma unroll
        for (unsigned e = 0; e < 4; ++e)
          sums.at[e] = canonical(add(sums.at[e], add(widen(theta.at[e]), -widen(after.at[e]))));
        store_quad(residual + first, sums);
        store_quad(param, theta);
      }
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) x[e] = sums.at[e];
    } else {
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) {
        const unsigned i = first + e;
        if (i >= left) continue;
        x[e] = gpu::load(static_cast<const float*>(residual) + i);
        if constexpr (kUpdates) {
          const V theta = gpu::load(static_cast<const V*>(piece.theta) + offset + i);
          V* const param = static_cast<V*>(piece.param) + offset + i;
          const float after = widen(gpu::load(static_cast<const V*>(param)));
          x[e] = canonical(add(x[e], add(widen(theta), -after)));
          gpu::store(residual + i, x[e]);
          gpu::store(param, theta);
        }
      }
    }
    store_sizes(t, t.sizes + piece.first_group + (offset >> t.bits), left, x);
  }
}

// The element of a selected group in a tensor; null behind its end, and for a wrong group.
__device__ __forceinline__ float* spot_of(const GroupTables& t, int32_t selected,
                                          unsigned element) {
  const auto group = static_cast<unsigned>(selected);
  if (group >= t.groups) return nullptr;
  const GroupPiece& piece = t.pieces[piece_of_group(t, group)];
  const unsigned i = ((group - piece.first_group) << t.bits) + element;
  return i < piece.count ? piece.residual + i : nullptr;
}

// What happens to the values of selected groups.
enum class Move : uint8_t { take, leave, restore };

// Grid: a row of blocks for each packet.
template <Move kMove, class Packets>
__global__ void __launch_bounds__(kRunThreads)
    move_values(const __grid_constant__ GroupTables t, const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  if (kMove == Move::leave && w.choice->all.bad) return;
  float* const values = static_cast<float*>(kMove == Move::leave ? w.errors : w.values);
  for (unsigned i = blockIdx.x * kRunThreads + threadIdx.x; i < w.value_count;
       i += gridDim.x * kRunThreads) {
    float* const at = spot_of(t, w.indices[i >> t.bits], i & ((1u << t.bits) - 1));
    if constexpr (kMove == Move::take) {
      values[i] = at == nullptr ? 0 : *at;
    } else if (at != nullptr) {
      const bool kept = kMove == Move::restore || magnitude(values[i]) < 0x7f800000u;
      *at = kept ? values[i] : 0;
    }
  }
}

}  // namespace pycomm::cuda
