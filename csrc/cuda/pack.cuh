// Writes exactly k elements of every selection, in index order; of equal magnitudes the lower index
// wins.
//
// A unit is a run of kRun tiles of one selection, shared by the warps of a block. The first pass
// counts the elements above and at the k-th magnitude for each unit and warp; the second sums the
// counts of earlier units and writes. So the order depends on positions only, not on the order of
// execution.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kWarps = kThreads / 32;
static_assert(kRun % kWarps == 0);

struct CountSpace {
  Counts by_warp[kWarps];
  Counts before;
};

// Sums over the warp, in all lanes.
__device__ __forceinline__ Counts sum_warp(Counts c) {
  for (int by = 16; by > 0; by /= 2) {
    c.greater += __shfl_xor_sync(gpu::kFullWarp, c.greater, by);
    c.equal += __shfl_xor_sync(gpu::kFullWarp, c.equal, by);
  }
  return c;
}

// Calls visit(items, piece) for the tiles of a unit of this warp.
template <class V, class Visit>
__device__ __forceinline__ void each_tile(const Tables& t, unsigned s, unsigned unit, Visit visit) {
  const Selection& selection = t.selections[s];
  const bool all = needs_all(selection, t.states[s]);
  const unsigned run = (unit - selection.first_unit) * kRun + threadIdx.x / 32 * (kRun / kWarps);
  for (unsigned i = run; i < min(run + kRun / kWarps, selection.tiles); ++i) {
    const unsigned tile = selection.first_tile + i;
    const Span span = t.spans[tile];
    if (!all && span.count == 0) continue;
    const Piece& piece = piece_of(t, tile);
    visit(all ? items_of_tile<V>(piece, tile) : items_of_pool<V>(t, selection, span), piece);
  }
}

template <class V>
__device__ __forceinline__ void count_unit(const Tables& t, unsigned s, unsigned unit) {
  auto& space = gpu::shared<CountSpace>();
  const Key<V> kth = static_cast<Key<V>>(t.states[s].kth);
  Counts mine{0, 0};
  each_tile<V>(t, s, unit, [&](const Items<V>& items, const Piece&) {
    for (unsigned i = gpu::lane_id(); i < items.count; i += 32) {
      const Key<V> key = magnitude(items.value(i));
      mine.greater += key > kth;
      mine.equal += key == kth;
    }
  });
  mine = sum_warp(mine);
  const unsigned warp = threadIdx.x / 32;
  if (gpu::lane_id() == 0) {
    space.by_warp[warp] = mine;
    t.warp_counts[size_t{unit} * kWarps + warp] = mine;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Counts sum{0, 0};
    for (const Counts& c : space.by_warp) {
      sum.greater += c.greater;
      sum.equal += c.equal;
    }
    t.unit_counts[unit] = sum;
  }
  __syncthreads();
}

// The counts before this warp's tiles in the selection.
__device__ __forceinline__ Counts counts_before(const Tables& t, unsigned s, unsigned unit) {
  auto& space = gpu::shared<CountSpace>();
  const unsigned warp = threadIdx.x / 32;
  Counts sum{0, 0};
  for (unsigned i = t.selections[s].first_unit + threadIdx.x; i < unit; i += kThreads) {
    sum.greater += gpu::load_fresh(&t.unit_counts[i].greater);
    sum.equal += gpu::load_fresh(&t.unit_counts[i].equal);
  }
  sum = sum_warp(sum);
  if (gpu::lane_id() == 0) space.by_warp[warp] = sum;
  __syncthreads();
  sum = {0, 0};
  for (const Counts& c : space.by_warp) {
    sum.greater += c.greater;
    sum.equal += c.equal;
  }
  for (unsigned w = 0; w < warp; ++w) {
    const Counts& c = t.warp_counts[size_t{unit} * kWarps + w];
    sum.greater += gpu::load_fresh(&c.greater);
    sum.equal += gpu::load_fresh(&c.equal);
  }
  __syncthreads();
  return sum;
}

template <class V>
__device__ __forceinline__ bool is_finite(V x) {
  return widen(x) - widen(x) == Wide<V>{0};
}

// Clears a sent element in u and v.
template <class V>
__device__ __forceinline__ void take(const Tables& t, const Piece& piece, unsigned i, void* u_value,
                                     V value) {
  V* const u = static_cast<V*>(piece.u);
  if (u_value != nullptr) *static_cast<V*>(u_value) = u[i];
  if (t.masking || !is_finite(value)) u[i] = V{0};
  static_cast<V*>(piece.v)[i] = V{0};
}

template <class V, bool kTake>
__device__ __forceinline__ void write_unit(const Tables& t, unsigned s, unsigned unit) {
  const Selection& selection = t.selections[s];
  const Key<V> kth = static_cast<Key<V>>(t.states[s].kth);
  const unsigned ties = t.states[s].ties, below = gpu::lanes_below();
  Counts before = counts_before(t, s, unit);
  each_tile<V>(t, s, unit, [&](const Items<V>& items, const Piece& piece) {
    for (unsigned first = 0; first < items.count; first += 32) {
      const unsigned i = first + gpu::lane_id();
      const bool inside = i < items.count;
      const V value = inside ? items.value(i) : V{};
      const Key<V> key = magnitude(value);
      const unsigned greater = __ballot_sync(gpu::kFullWarp, inside && key > kth);
      const unsigned equal = __ballot_sync(gpu::kFullWarp, inside && key == kth);
      const unsigned g = before.greater + static_cast<unsigned>(__popc(greater & below));
      const unsigned e = before.equal + static_cast<unsigned>(__popc(equal & below));
      if (inside && (key > kth || (key == kth && e < ties))) {
        const unsigned at = g + min(e, ties), place = items.place_of(i);
        if (selection.indices != nullptr)
          selection.indices[at] = static_cast<int32_t>(selection.first + place);
        if (selection.values != nullptr) static_cast<V*>(selection.values)[at] = value;
        if constexpr (kTake) {
          V* const u_values = static_cast<V*>(selection.u_values);
          take(t, piece, place - piece.place, u_values == nullptr ? nullptr : u_values + at, value);
        }
      }
      before.greater += static_cast<unsigned>(__popc(greater));
      before.equal += static_cast<unsigned>(__popc(equal));
    }
  });
}

// The packet of a skipped step: the first k indices, with zero values.
template <class V>
__device__ __forceinline__ void write_nothing(const Tables& t, unsigned rank) {
  for (unsigned s = 0; s < t.selection_count; ++s) {
    const Selection& selection = t.selections[s];
    for (unsigned i = rank * kThreads + threadIdx.x; i < selection.k;
         i += t.pack_blocks * kThreads) {
      selection.indices[i] = static_cast<int32_t>(selection.first + i);
      static_cast<V*>(selection.values)[i] = V{0};
      if (selection.u_values != nullptr) static_cast<V*>(selection.u_values)[i] = V{0};
    }
  }
}

// Grid: 2 * pack_blocks blocks. kTake: clear sent elements in u and v.
template <class V, bool kTake>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ Tables t) {
  const Turn turn = take_turn(t.header->pack, t.pack_blocks);
  if (stopped(t)) {
    if (turn.pass == 1) write_nothing<V>(t, turn.rank);
  } else {
    for (unsigned unit = turn.rank; unit < t.units; unit += t.pack_blocks) {
      const unsigned s = find_last(t.selection_count, unit,
                                   [&](unsigned i) { return t.selections[i].first_unit; });
      if (t.selections[s].k == 0) continue;
      if (turn.pass == 0)
        count_unit<V>(t, s, unit);
      else
        write_unit<V, kTake>(t, s, unit);
    }
  }
  end_turn(t.header->pack);
}

}  // namespace pycomm::cuda
