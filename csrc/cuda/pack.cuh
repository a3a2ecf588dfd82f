// Writes exactly k elements of every selection, in index order; of equal magnitudes the lower index
// wins.
//
// A unit is a run of tiles of one selection, shared by the warps of a block. A block counts the
// elements above and at the k-th magnitude in its unit, publishes both counts, adds those of all
// earlier units, and writes. So the order depends on positions only, not on the order of execution.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

// Loads of a lane before the first is used: of tiles, and within a tile.
inline constexpr unsigned kTilesAhead = 4, kAhead = 8;

inline constexpr unsigned kPackBlocks = 4;  // of a multiprocessor

struct CountSpace {
  Counts by_warp[kWarps];
  Counts before[kWarps];
};

__device__ __forceinline__ void operator+=(Counts& a, const Counts& b) {
  a.greater += b.greater;
  a.equal += b.equal;
}

// The sum over the warp, in all lanes.
__device__ __forceinline__ Counts sum_warp(Counts c) {
  return {sum_lanes(c.greater), sum_lanes(c.equal)};
}

// Both counts are below 2^31. The highest bit is set.
__device__ __forceinline__ PackedCounts packed(Counts c) {
  return PackedCounts{1} << 63 | PackedCounts{c.greater} << 31 | c.equal;
}
__device__ __forceinline__ Counts unpacked(PackedCounts c) {
  return {static_cast<unsigned>(c >> 31), static_cast<unsigned>(c & 0x7fffffffu)};
}

// Registers have no index: the next value moves to the first place, so that a loop over the values
// need not be unrolled. The time of a small selection is that of loading the instructions.
template <unsigned kCount, class V>
__device__ __forceinline__ void shift_down(V (&values)[kCount]) {
#pragma unroll
  for (unsigned i = 0; i + 1 < kCount; ++i) values[i] = values[i + 1];
}

// Calls visit(items, piece, loaded) for the tiles of a unit of this warp, in order. `loaded` is the
// lane's first value. It is loaded for kTilesAhead tiles at once.
template <class V, class Visit>
__device__ __forceinline__ void each_tile(const Tables& t, unsigned s, unsigned unit, Visit visit) {
  const Selection& selection = t.selections[s];
  const bool all = needs_all(selection, t.states[s]);
  const unsigned each = t.run / kWarps, lane = gpu::lane_id();
  const unsigned from = (unit - selection.first_unit) * t.run + threadIdx.x / 32 * each;
  const unsigned end = selection.first_tile + min(from + each, selection.tiles);
  unsigned first = selection.first_tile + from;
  if (first >= end) return;
  const Piece* piece = &piece_of(t, first);
  for (; first < end; first += kTilesAhead) {
    const unsigned mine = first + lane;
    const Span span = !all && lane < kTilesAhead && mine < end ? t.spans[mine] : Span{0, 0};
    const auto items_of = [&](unsigned a) -> Items<V> {
      const Span there{__shfl_sync(gpu::kFullWarp, span.first, static_cast<int>(a)),
                       __shfl_sync(gpu::kFullWarp, span.count, static_cast<int>(a))};
      if (!all) return items_of_pool<V>(t, selection, there);
      return first + a < end ? items_of_tile<V>(*piece, first + a) : Items<V>{};
    };
    const auto advance = [&](unsigned a) {
      while (first + a < end && first + a - piece->first_tile >= (piece->count + kTile - 1) / kTile)
        ++piece;
    };
    const Piece* const start = piece;
    V loaded[kTilesAhead];
#pragma unroll
    for (unsigned a = 0; a < kTilesAhead; ++a) {
      if (all) advance(a);
      const Items<V> items = items_of(a);
      loaded[a] = lane < items.count ? gpu::load(&items.values[lane]) : V{};
    }
    piece = start;
#pragma unroll 1
    for (unsigned a = 0; a < kTilesAhead; ++a) {
      advance(a);
      const Items<V> items = items_of(a);
      if (items.count != 0) visit(items, *piece, loaded[0]);
      shift_down(loaded);
    }
  }
}

// Calls visit(i, value) for the elements of a tile, 32 at once, in order: i is the lane's element,
// and may be past the end.
template <class V, class Visit>
__device__ __forceinline__ void each_element(const Items<V>& items, V loaded, Visit visit) {
  const unsigned lane = gpu::lane_id();
  V values[kAhead] = {loaded};
  unsigned left = 1;  // values that are loaded
#pragma unroll 1
  for (unsigned first = 0; first < items.count; first += 32) {
    if (left == 0) {
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
        const unsigned i = first + 32 * a + lane;
        values[a] = i < items.count ? gpu::load(&items.values[i]) : V{};
      }
      left = kAhead;
    }
    visit(first + lane, values[0]);
    shift_down(values);
    --left;
  }
}

// The counts of the warp's tiles.
template <class V>
__device__ __forceinline__ Counts count_tiles(const Tables& t, unsigned s, unsigned unit) {
  const Key<V> kth = static_cast<Key<V>>(t.states[s].kth);
  Counts mine{0, 0};
  each_tile<V>(t, s, unit, [&](const Items<V>& items, const Piece&, V loaded) {
    each_element<V>(items, loaded, [&](unsigned i, V value) {
      const Key<V> key = magnitude(value);
      mine.greater += i < items.count && key > kth;
      mine.equal += i < items.count && key == kth;
    });
  });
  return sum_warp(mine);
}

// Publishes the counts of the unit. Returns those before this warp's tiles in the selection.
__device__ __forceinline__ Counts counts_before(const Tables& t, unsigned s, unsigned unit,
                                                Counts mine) {
  auto& space = gpu::shared<CountSpace>();
  const unsigned warp = threadIdx.x / 32;
  if (gpu::lane_id() == 0) space.by_warp[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Counts sum{0, 0};
    for (const Counts& one : space.by_warp) sum += one;
    gpu::store_relaxed(&t.unit_counts[unit], packed(sum));
  }
  Counts earlier{0, 0};
  for (unsigned i = t.selections[s].first_unit + threadIdx.x; i < unit; i += kThreads) {
    PackedCounts counts = gpu::load_relaxed(&t.unit_counts[i]);
    for (; counts == 0; counts = gpu::load_relaxed(&t.unit_counts[i])) gpu::pause();
    earlier += unpacked(counts);
  }
  earlier = sum_warp(earlier);
  if (gpu::lane_id() == 0) space.before[warp] = earlier;
  __syncthreads();
  Counts before{0, 0};
  for (const Counts& one : space.before) before += one;
  for (unsigned w = 0; w < warp; ++w) before += space.by_warp[w];
  return before;
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
__device__ __forceinline__ void write_tiles(const Tables& t, unsigned s, unsigned unit,
                                            Counts before) {
  const Selection& selection = t.selections[s];
  const Key<V> kth = static_cast<Key<V>>(t.states[s].kth);
  const unsigned ties = t.states[s].ties, below = gpu::lanes_below();
  each_tile<V>(t, s, unit, [&](const Items<V>& items, const Piece& piece, V loaded) {
    each_element<V>(items, loaded, [&](unsigned i, V value) {
      const bool inside = i < items.count;
      const Key<V> key = magnitude(value);
      const unsigned greater = __ballot_sync(gpu::kFullWarp, inside && key > kth);
      const unsigned equal = __ballot_sync(gpu::kFullWarp, inside && key == kth);
      const unsigned g = before.greater + static_cast<unsigned>(__popc(greater & below));
      const unsigned e = before.equal + static_cast<unsigned>(__popc(equal & below));
      const unsigned at = g + min(e, ties);
      // Elements past k exist only if another kernel changes v during the step.
      if (inside && at < selection.k && (key > kth || (key == kth && e < ties))) {
        const unsigned place = items.place_of(i);
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
    });
  });
}

// The packet of a skipped step: the first k indices, with zero values.
template <class V>
__device__ __forceinline__ void write_nothing(const Tables& t) {
  for (unsigned s = 0; s < t.selection_count; ++s) {
    const Selection& selection = t.selections[s];
    for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < selection.k;
         i += gridDim.x * kThreads) {
      selection.indices[i] = static_cast<int32_t>(selection.first + i);
      static_cast<V*>(selection.values)[i] = V{0};
      if (selection.u_values != nullptr) static_cast<V*>(selection.u_values)[i] = V{0};
    }
  }
}

// Grid: one block per unit. kTake: clear sent elements in u and v.
template <class V, bool kTake>
__global__ void __launch_bounds__(kThreads, kPackBlocks) pack(const __grid_constant__ Tables t) {
  if (stopped(t)) return write_nothing<V>(t);
  const unsigned unit = take_ticket(t.header->pack);
  const unsigned s = find_last(t.selection_count, unit,
                               [&](unsigned i) { return t.selections[i].first_unit; });
  if (t.selections[s].k == 0) return;  // no block waits for its counts
  const Counts before = counts_before(t, s, unit, count_tiles<V>(t, s, unit));
  write_tiles<V, kTake>(t, s, unit, before);
}

}  // namespace pycomm::cuda
