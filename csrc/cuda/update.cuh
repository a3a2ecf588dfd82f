// The pass over the tensors: updates u and v, and fills the pool of candidates.
//
// It uses 16-byte accesses and one chain of operations per element; no block waits for another. A
// tile reserves its part of the pool with one atomic and fills it in index order.
#pragma once

#include "cuda/tile.cuh"

namespace pycomm::cuda {

// The update of an element. kernels/device_kernels.h has the formula.
template <class V>
struct Rule {
  V momentum, weight_decay, scale;
  const V* scales;  // by piece; may be null
  bool nesterov;

  __device__ __forceinline__ void operator()(V x, V& u, V& v) const {
    if (nesterov) {
      u = canonical(multiply(momentum, add(u, x)));
      v = canonical(add(v, add(u, x)));
    } else {
      u = canonical(fused(momentum, u, x));
      v = canonical(add(v, u));
    }
  }
};

struct PoolSpace {
  unsigned counts[kWarps];          // by warp: one byte for each of its rows
  unsigned starts[kWarps * kRows];  // by warp, then row
  unsigned first;                   // start of the tile's part of the pool
};

// Elements at or above the lower bound enter the pool, in order: warp, row, lane, element.
template <class V>
__device__ __forceinline__ void pool_share(const Tables& t, unsigned tile, const Piece& piece,
                                           const Share<V>& share) {
  const Selection& selection = t.selections[piece.selection];
  State& state = t.states[piece.selection];
  const uint64_t bound = state.bound;
  const unsigned offset = (tile - piece.first_tile) * kTile, left = piece.count - offset;
  auto& space = gpu::shared<PoolSpace>();
  const unsigned lane = gpu::lane_id(), warp = threadIdx.x / 32;

  unsigned hits = 0, counts = 0;
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r)
#pragma unroll
    for (unsigned e = 0; e < 4; ++e)
      if (magnitude(share.row[r].at[e]) >= bound && place_in_tile(r) + e < left) {
        hits |= 1u << (r * 4 + e);
        counts += 1u << (r * 8);
      }
  unsigned upto = counts;  // at most 128 per warp and row, which fit a byte
  if (__any_sync(gpu::kFullWarp, hits != 0)) {
    for (unsigned by = 1; by < 32; by *= 2) {
      const unsigned below = __shfl_up_sync(gpu::kFullWarp, upto, by);
      if (lane >= by) upto += below;
    }
  }
  if (lane == 31) space.counts[warp] = upto;
  __syncthreads();
  if (warp == 0) {  // one lane per row and warp
    static_assert(kWarps * kRows <= 32);
    const bool used = lane < kWarps * kRows;
    const unsigned mine = used ? space.counts[lane / kRows] >> (lane % kRows * 8) & 255 : 0;
    unsigned sum = mine;
    for (unsigned by = 1; by < 32; by *= 2) {
      const unsigned below = __shfl_up_sync(gpu::kFullWarp, sum, by);
      if (lane >= by) sum += below;
    }
    if (used) space.starts[lane] = sum - mine;
    if (lane == 31) {
      space.first = sum == 0 ? 0 : atomicAdd(&state.count, sum);
      gpu::store(&t.spans[tile].first, space.first);
      gpu::store(&t.spans[tile].count, sum);
    }
  }
  __syncthreads();
  if (hits == 0) return;
  V* values = static_cast<V*>(t.pool_values) + selection.pool;
  unsigned* places = t.pool_places + selection.pool;
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) {
    unsigned at = space.first + space.starts[warp * kRows + r] + ((upto - counts) >> (r * 8) & 255);
#pragma unroll
    for (unsigned e = 0; e < 4; ++e) {
      if ((hits >> (r * 4 + e) & 1) == 0) continue;
      if (at < selection.capacity) {
        gpu::store(&values[at], share.row[r].at[e]);
        gpu::store(&places[at], piece.place + offset + place_in_tile(r) + e);
      }
      ++at;
    }
  }
}

// G and W: types of gradients and weights. Without kDecay, weights are not read.
template <bool kWhole, bool kDecay, class G, class W, class V>
__device__ __forceinline__ Share<V> step_share(const Piece& piece, unsigned offset, V scale,
                                               const Rule<V>& rule) {
  const unsigned left = piece.count - offset;
  V* const u_at = static_cast<V*>(piece.u) + offset;
  V* const v_at = static_cast<V*>(piece.v) + offset;
  const Share<G> grad = load_share<kWhole>(static_cast<const G*>(piece.grad) + offset, left);
  Share<V> u = load_share<kWhole>(u_at, left), v = load_share<kWhole>(v_at, left);
  Share<W> weight;
  if constexpr (kDecay)
    weight = load_share<kWhole>(static_cast<const W*>(piece.weight) + offset, left);
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r)
#pragma unroll
    for (unsigned e = 0; e < 4; ++e) {
      V x = multiply(scale, static_cast<V>(widen(grad.row[r].at[e])));
      if constexpr (kDecay)
        x = fused(rule.weight_decay, static_cast<V>(widen(weight.row[r].at[e])), x);
      rule(x, u.row[r].at[e], v.row[r].at[e]);
    }
  store_share<kWhole>(u_at, u, left);
  store_share<kWhole>(v_at, v, left);
  return v;
}

// Grid: one block per tile.
template <bool kDecay, class G, class W, class V>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ Tables t, const __grid_constant__ Rule<V> rule) {
  if (stopped(t)) return;
  const unsigned tile = blockIdx.x;
  const Piece& entry = piece_of_block(t, tile);
  const Piece piece = entry;
  const unsigned offset = (tile - piece.first_tile) * kTile;
  const V scale = rule.scales == nullptr ? rule.scale : rule.scales[&entry - t.pieces];
  const bool whole = piece.aligned && piece.count - offset >= kTile;
  const Share<V> v = whole ? step_share<true, kDecay, G, W>(piece, offset, scale, rule)
                           : step_share<false, kDecay, G, W>(piece, offset, scale, rule);
  pool_share(t, tile, piece, v);
}

// The same for topk, which only reads the array.
template <class V>
__global__ void __launch_bounds__(kThreads) collect(const __grid_constant__ Tables t) {
  const unsigned tile = blockIdx.x;
  const Piece piece = piece_of_block(t, tile);
  const unsigned offset = (tile - piece.first_tile) * kTile, left = piece.count - offset;
  const V* const at = static_cast<const V*>(piece.v) + offset;
  const Share<V> x =
      piece.aligned && left >= kTile ? load_share<true>(at, left) : load_share<false>(at, left);
  pool_share(t, tile, piece, x);
}

}  // namespace pycomm::cuda
