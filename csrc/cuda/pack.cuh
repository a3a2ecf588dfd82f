// Writes exactly k elements of every selection, in index order; of equal magnitudes the lower index
// wins.
//
// A unit is a run of tiles of one selection, shared by the warps of a block. A block counts the
// elements above and at the k-th magnitude in its unit, publishes both counts, adds those of all
// earlier units, and writes. So the order depends on positions only, not on the order of execution.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

// Loads of a lane before the first is used: from the pool, and from a tile.
inline constexpr unsigned kAhead = 4, kTileAhead = 8;

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

// The tiles of a warp in a unit: [first, end).
struct TileRange {
  unsigned first, end;
};

__device__ __forceinline__ TileRange tiles_of_warp(const Tables& t, const Selection& selection,
                                                   unsigned unit) {
  const unsigned each = t.run / kWarps;
  const unsigned from = (unit - selection.first_unit) * t.run + threadIdx.x / 32 * each;
  return {selection.first_tile + min(from, selection.tiles),
          selection.first_tile + min(from + each, selection.tiles)};
}

// The elements of a lane that are loaded before the first is used.
template <class V>
struct PoolEntries {
  V values[kAhead];
  unsigned places[kAhead], pieces[kAhead];

  __device__ __forceinline__ void next() {
    shift_down(values);
    shift_down(places);
    shift_down(pieces);
  }
};

// Calls visit(inside, value, place, piece) for the pool entries of the warp's tiles, 32 at once, in
// order. Lanes past the end are not inside. The entries of 32 tiles are one list: lane i has the
// end of tile i in it.
template <bool kPlaces, class V, class Visit>
__device__ __forceinline__ void each_in_pool(const Tables& t, const Selection& selection,
                                             TileRange tiles, Visit visit) {
  const unsigned lane = gpu::lane_id();
  const V* const values = static_cast<const V*>(t.pool_values) + selection.pool;
  const unsigned* const places = t.pool_places + selection.pool;
#pragma unroll 1
  for (unsigned first = tiles.first; first < tiles.end; first += 32) {
    const unsigned mine = first + lane;
    const Span span = mine < tiles.end ? t.spans[mine] : Span{0, 0};
    const unsigned end = scan_lanes(span.count), shift = span.first - (end - span.count);
    const unsigned piece = kPlaces ? piece_of_lane(t, min(mine, tiles.end - 1)) : 0;
    const unsigned count = __shfl_sync(gpu::kFullWarp, end, 31);
#pragma unroll 1
    for (unsigned begin = 0; begin < count; begin += 32 * kAhead) {
      PoolEntries<V> ahead;
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
        const unsigned i = begin + 32 * a + lane;
        unsigned tile = 0;  // the tiles that end at or before entry i
#pragma unroll
        for (unsigned step = 16; step > 0; step /= 2)
          if (__shfl_sync(gpu::kFullWarp, end, static_cast<int>(tile + step - 1)) <= i)
            tile += step;
        const unsigned at = i + __shfl_sync(gpu::kFullWarp, shift, static_cast<int>(tile));
        ahead.pieces[a] = __shfl_sync(gpu::kFullWarp, piece, static_cast<int>(tile));
        ahead.values[a] = i < count ? gpu::load(&values[at]) : V{};
        ahead.places[a] = kPlaces && i < count ? gpu::load(&places[at]) : 0;
      }
#pragma unroll 1
      for (unsigned i = begin; i < min(count, begin + 32 * kAhead); i += 32) {
        visit(i + lane < count, ahead.values[0], ahead.places[0], ahead.pieces[0]);
        ahead.next();
      }
    }
  }
}

// The same for all elements of the tiles.
template <class V, class Visit>
__device__ __forceinline__ void each_in_tiles(const Tables& t, TileRange tiles, Visit visit) {
  const unsigned lane = gpu::lane_id();
#pragma unroll 1
  for (unsigned tile = tiles.first; tile < tiles.end; ++tile) {
    const Piece& piece = piece_of(t, tile);
    const Items<V> items = items_of_tile<V>(piece, tile);
    const unsigned number = static_cast<unsigned>(&piece - t.pieces);
#pragma unroll 1
    for (unsigned begin = 0; begin < items.count; begin += 32 * kTileAhead) {
      V values[kTileAhead];
#pragma unroll
      for (unsigned a = 0; a < kTileAhead; ++a) {
        const unsigned i = begin + 32 * a + lane;
        values[a] = i < items.count ? gpu::load(&items.values[i]) : V{};
      }
#pragma unroll 1
      for (unsigned i = begin; i < min(items.count, begin + 32 * kTileAhead); i += 32) {
        visit(i + lane < items.count, values[0], items.place + i + lane, number);
        shift_down(values);
      }
    }
  }
}

template <bool kPlaces, class V, class Visit>
__device__ __forceinline__ void each_element(const Tables& t, unsigned s, unsigned unit,
                                             Visit visit) {
  const Selection& selection = t.selections[s];
  const TileRange tiles = tiles_of_warp(t, selection, unit);
  if (needs_all(selection, t.states[s]))
    each_in_tiles<V>(t, tiles, visit);
  else
    each_in_pool<kPlaces, V>(t, selection, tiles, visit);
}

// The counts of the warp's tiles.
template <class V>
__device__ __forceinline__ Counts count_tiles(const Tables& t, unsigned s, unsigned unit) {
  const Key<V> kth = static_cast<Key<V>>(t.states[s].kth);
  Counts mine{0, 0};
  each_element<false, V>(t, s, unit, [&](bool inside, V value, unsigned, unsigned) {
    const Key<V> key = magnitude(value);
    mine.greater += inside && key > kth;
    mine.equal += inside && key == kth;
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
  each_element<true, V>(t, s, unit, [&](bool inside, V value, unsigned place, unsigned number) {
    const Key<V> key = magnitude(value);
    const unsigned greater = __ballot_sync(gpu::kFullWarp, inside && key > kth);
    const unsigned equal = __ballot_sync(gpu::kFullWarp, inside && key == kth);
    const unsigned g = before.greater + static_cast<unsigned>(__popc(greater & below));
    const unsigned e = before.equal + static_cast<unsigned>(__popc(equal & below));
    const unsigned at = g + min(e, ties);
    // Elements past k exist only if another kernel changes v during the step.
    if (inside && at < selection.k && (key > kth || (key == kth && e < ties))) {
      if (selection.indices != nullptr)
        selection.indices[at] = static_cast<int32_t>(selection.first + place);
      if (selection.values != nullptr) static_cast<V*>(selection.values)[at] = value;
      if constexpr (kTake) {
        const Piece& piece = t.pieces[number];
        V* const u_values = static_cast<V*>(selection.u_values);
        take(t, piece, place - piece.place, u_values == nullptr ? nullptr : u_values + at, value);
      }
    }
    before.greater += static_cast<unsigned>(__popc(greater));
    before.equal += static_cast<unsigned>(__popc(equal));
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
  const unsigned s =
      find_last(t.selection_count, unit, [&](unsigned i) { return t.selections[i].first_unit; });
  if (t.selections[s].k == 0) return;  // no block waits for its counts
  const Counts before = counts_before(t, s, unit, count_tiles<V>(t, s, unit));
  write_tiles<V, kTake>(t, s, unit, before);
}

}  // namespace pycomm::cuda
