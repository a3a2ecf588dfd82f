// The exact k-th magnitude of every selection: a radix select in one launch.
//
// Digit d of the keys that agree with the k-th in all higher digits is counted. The block that
// finishes the last unit of a selection finds the digit and publishes it; the blocks of the next
// digit wait for that. The last digit gives the k-th magnitude, the number of equal ones among the
// k, and the lower bound of the next step. For that bound a second rank, 1.5k, is followed through
// the first two digits.
//
// A selection of few units is done by one block, for all digits, in shared memory.
#pragma once

#include "cuda/tile.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kAlone = 2;  // units that one block counts for all digits

// State of a rank across the digits.
template <class V>
struct Rank {
  Key<V> prefix;
  unsigned want;
};
// The k-th, and the rank down to which the pool should reach.
template <class V>
struct Ranks {
  Rank<V> kth, reach;
};

template <class V>
__device__ __forceinline__ unsigned digit_of(Key<V> key, unsigned digit) {
  return static_cast<unsigned>(key >> digit_shift<V>(digit)) & ((1u << digit_bits<V>(digit)) - 1);
}

// Whether two keys agree in the digits above this one.
template <class V>
__device__ __forceinline__ bool agree(Key<V> a, Key<V> b, unsigned digit) {
  return digit == 0 || (a ^ b) >> digit_shift<V>(digit - 1) == 0;
}

__device__ __forceinline__ unsigned reach_of(const Selection& selection) {
  return min(selection.count, selection.k + selection.k / 2 + 1);
}

// Units of work of a selection: tiles of its pool or of its pieces.
__device__ __forceinline__ unsigned units_of(const Selection& selection, const State& state) {
  if (selection.k == 0) return 0;
  return needs_all(selection, state) ? selection.tiles : (state.count + kTile - 1) / kTile;
}

// The units that blocks share out for a digit; a selection that one block does is one unit of the
// first digit.
__device__ __forceinline__ unsigned shared_units(unsigned units, unsigned digit) {
  if (units > kAlone) return units;
  return digit == 0 && units != 0 ? 1 : 0;
}

template <class V>
__device__ __forceinline__ Items<V> items_of_unit(const Tables& t, unsigned s, unsigned unit) {
  const Selection& selection = t.selections[s];
  const State& state = t.states[s];
  if (!needs_all(selection, state)) {
    const unsigned from = unit * kTile;
    return items_of_pool<V>(t, selection, {from, min(kTile, state.count - from)});
  }
  const unsigned tile = selection.first_tile + unit;
  return items_of_tile<V>(piece_of(t, tile), tile);
}

template <class V>
__device__ __forceinline__ Share<V> load_items(const Items<V>& items) {
  return items.aligned && items.count == kTile ? load_share<true>(items.values, kTile)
                                               : load_share<false>(items.values, items.count);
}

// Both ranks before the first digit.
template <class V>
__device__ __forceinline__ Ranks<V> first_ranks(const Selection& selection, const State& state) {
  const unsigned items = needs_all(selection, state) ? selection.count : state.count;
  return {{0, selection.k}, {0, min(items, reach_of(selection))}};
}

// Both ranks after `digit` digits: waits for the block that publishes them.
template <class V>
__device__ __forceinline__ Ranks<V> wait_for_ranks(const State& state, unsigned digit) {
  auto& found = gpu::shared<Ranks<V>>();
  if (threadIdx.x == 0) {
    while (gpu::load_acquire(&state.digits) < digit) gpu::pause();
    found = {{static_cast<Key<V>>(gpu::load_fresh(&state.kth)), gpu::load_fresh(&state.ties)},
             {static_cast<Key<V>>(gpu::load_fresh(&state.reach)), gpu::load_fresh(&state.left)}};
  }
  __syncthreads();
  return found;  // valid until the next barrier
}

// A digit of both ranks. bin(together, b) is the count of a bin: of the k-th's, or, if the ranks
// differ in an earlier digit, of the other's.
template <class V, class Bin>
__device__ __forceinline__ void follow(Ranks<V>& ranks, unsigned digit, Bin bin) {
  const bool together = agree<V>(ranks.kth.prefix, ranks.reach.prefix, digit);
#pragma unroll 1
  for (unsigned which = 0; which < (digit > 1 ? 1 : 2); ++which) {
    Rank<V> rank = which == 0 ? ranks.kth : ranks.reach;
    const bool own = which == 0 || together;
    const Found found = narrow<kThreads>(1u << digit_bits<V>(digit), rank.want,
                                         [&](unsigned b) { return bin(own, b); });
    rank.prefix |= static_cast<Key<V>>(found.bin) << digit_shift<V>(digit);
    rank.want = found.want;
    if (which == 0)
      ranks.kth = rank;
    else
      ranks.reach = rank;
  }
}

template <class V>
struct BinSpace {
  unsigned kth[1u << digit_bits<V>(0)];
  unsigned reach[1u << digit_bits<V>(1)];
};
struct ListSpace {
  unsigned first[kThreads + 1];  // unit of each selection
};
struct LastSpace {
  bool is;  // whether this block finished the last unit of a selection
};

// The lower bound of the next step: the magnitude of rank 1.5k, times its trend if that falls. A
// rising trend, as in the first steps, is ignored: it flattens, and a bound that is too high costs
// a repair, while one that is too low only needs a larger pool. If the pool ends before rank 1.5k,
// the bound is extrapolated from the slope between rank k and the last rank of the pool.
template <class V>
__device__ __forceinline__ Memory look_ahead(const Tables& t, unsigned s, const Ranks<V>& ranks) {
  const Selection& selection = t.selections[s];
  const State& state = t.states[s];
  const unsigned reach = reach_of(selection);
  const V here = from_magnitude<V>(ranks.reach.prefix);
  const bool useful = magnitude(here) != 0 && here - here == V{0} && reach <= selection.capacity;
  if (!useful) return {0, 0};
  V bound;
  if (!needs_all(selection, state) && state.count < reach) {
    const V slope = (from_magnitude<V>(ranks.kth.prefix) - here) /
                    static_cast<V>(state.count - selection.k + 1);
    const V guess = here - slope * static_cast<V>(reach - state.count);
    bound = guess > here / 2 ? guess : here / 2;
  } else {
    const uint64_t last = t.memory[s].reach;
    V trend = last == 0 ? V{1} : here / from_magnitude<V>(static_cast<Key<V>>(last - 1));
    trend = trend < V(0.5) ? V(0.5) : trend > V{1} ? V{1} : trend;
    bound = here * trend;
  }
  return {uint64_t{magnitude(bound)} + 1, uint64_t{ranks.reach.prefix} + 1};
}

template <class V>
__device__ __forceinline__ void settle(const Tables& t, unsigned s, const Ranks<V>& ranks) {
  t.states[s].kth = ranks.kth.prefix;
  t.states[s].ties = ranks.kth.want;
  if constexpr (std::is_same_v<V, Wide<V>>) t.memory[s] = look_ahead<V>(t, s, ranks);
  if (t.threshold != nullptr) *static_cast<V*>(t.threshold) = from_magnitude<V>(ranks.kth.prefix);
}

// A block's bins for one selection.
template <class V>
struct Counter {
  const Tables& t;
  unsigned digit;
  unsigned selection = ~0u;
  unsigned units = 0;  // of it that are counted
  Ranks<V> ranks{};

  __device__ __forceinline__ bool apart() const {
    return digit == 1 && !agree<V>(ranks.kth.prefix, ranks.reach.prefix, 1);
  }
  __device__ __forceinline__ void clear() {
    auto& space = gpu::shared<BinSpace<V>>();
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      space.kth[b] = 0;
      if (digit == 1) space.reach[b] = 0;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void turn_to(unsigned s) {
    if (s == selection) return;
    selection = s;
    ranks = digit == 0 ? first_ranks<V>(t.selections[s], t.states[s])
                       : wait_for_ranks<V>(t.states[s], digit);
    clear();
  }
  __device__ __forceinline__ void count(const Share<V>& share, unsigned left) {
    auto& space = gpu::shared<BinSpace<V>>();
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r)
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) {
        if (place_in_tile(r) + e >= left) continue;
        const Key<V> key = magnitude(share.row[r].at[e]);
        if (agree<V>(key, ranks.kth.prefix, digit))
          atomicAdd(&space.kth[digit_of<V>(key, digit)], 1u);
        if (apart() && agree<V>(key, ranks.reach.prefix, 1))
          atomicAdd(&space.reach[digit_of<V>(key, 1)], 1u);
      }
    ++units;
  }
  // Adds the bins to those of other blocks. The last block of the selection finds the digit.
  __device__ __forceinline__ void finish() {
    auto& space = gpu::shared<BinSpace<V>>();
    unsigned* bins = t.bins + size_t{selection} * kBins<V>;
    __syncthreads();
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      if (space.kth[b] != 0) atomicAdd(&bins[first_bin<V>(digit) + b], space.kth[b]);
      if (apart() && space.reach[b] != 0) atomicAdd(&bins[kReachBins<V> + b], space.reach[b]);
    }
    const unsigned s = selection;
    State& state = t.states[s];
    selection = ~0u;
    auto& last = gpu::shared<LastSpace>().is;
    __syncthreads();
    if (threadIdx.x == 0)
      last = gpu::add_release(&state.finished, units) + units ==
             units_of(t.selections[s], state) * (digit + 1);
    __syncthreads();
    units = 0;
    if (!last) return;
    follow<V>(ranks, digit, [&](bool own, unsigned b) {
      return gpu::load_fresh(&bins[(own ? first_bin<V>(digit) : kReachBins<V>) + b]);
    });
    if (threadIdx.x != 0) return;
    if (digit + 1 == kDigits<V>) return settle<V>(t, s, ranks);
    state.kth = ranks.kth.prefix;
    state.ties = ranks.kth.want;
    state.reach = ranks.reach.prefix;
    state.left = ranks.reach.want;
    gpu::store_release(&state.digits, digit + 1);
  }
};

// Finds all digits of a selection in this block.
template <class V>
__device__ __forceinline__ void select_alone(const Tables& t, unsigned s) {
  auto& space = gpu::shared<BinSpace<V>>();
  const unsigned units = units_of(t.selections[s], t.states[s]);
  Counter<V> counter{t, 0};
  counter.ranks = first_ranks<V>(t.selections[s], t.states[s]);
  for (; counter.digit < kDigits<V>; ++counter.digit) {
    counter.clear();
    for (unsigned unit = 0; unit < units; ++unit) {
      const Items<V> items = items_of_unit<V>(t, s, unit);
      counter.count(load_items(items), items.count);
    }
    __syncthreads();
    follow<V>(counter.ranks, counter.digit,
              [&](bool own, unsigned b) { return own ? space.kth[b] : space.reach[b]; });
  }
  if (threadIdx.x == 0) settle<V>(t, s, counter.ranks);
}

// The units of all selections for the first digit and for each later one.
struct Work {
  unsigned first, later;
};
struct WorkSpace {
  Work by_warp[kWarps];
};

__device__ __forceinline__ Work all_work(const Tables& t) {
  Work mine{0, 0};
  for (unsigned s = threadIdx.x; s < t.selection_count; s += kThreads) {
    const unsigned units = units_of(t.selections[s], t.states[s]);
    mine.first += shared_units(units, 0);
    mine.later += shared_units(units, 1);
  }
  auto& space = gpu::shared<WorkSpace>().by_warp;
  mine = {sum_lanes(mine.first), sum_lanes(mine.later)};
  if (gpu::lane_id() == 0) space[threadIdx.x / 32] = mine;
  __syncthreads();
  Work all{0, 0};
  for (const Work& one : space) {
    all.first += one.first;
    all.later += one.later;
  }
  return all;
}

template <class V>
__device__ __forceinline__ void count_digit(const Tables& t, unsigned digit, unsigned rank,
                                            unsigned blocks) {
  auto& list = gpu::shared<ListSpace>().first;
  Counter<V> counter{t, digit};
  unsigned first = 0, listed = 0, all = 0, unit = rank;  // unit of the listed selections
  for (;;) {
    while (unit >= all && listed < t.selection_count) {
      first = listed;
      listed += kThreads;
      unit -= all;
      const unsigned mine = first + threadIdx.x;
      const unsigned units = mine < t.selection_count ? units_of(t.selections[mine], t.states[mine])
                                                      : 0;
      __syncthreads();
      list[threadIdx.x + 1] = scan_block<kThreads>(shared_units(units, digit));
      if (threadIdx.x == 0) list[0] = 0;
      __syncthreads();
      all = list[kThreads];
    }
    const bool over = unit >= all;
    const unsigned at =
        over ? 0 : find_last(kThreads, unit, [&](unsigned i) { return list[i]; });
    const unsigned s = first + at;
    const bool alone = !over && units_of(t.selections[s], t.states[s]) <= kAlone;
    if (counter.selection != ~0u && (over || s != counter.selection)) counter.finish();
    if (over) return;
    if (alone) {
      select_alone<V>(t, s);
    } else {
      const Items<V> items = items_of_unit<V>(t, s, unit - list[at]);
      const Share<V> share = load_items(items);  // before the wait for the digits before
      counter.turn_to(s);
      counter.count(share, items.count);
    }
    unit += blocks;
  }
}

// Grid: kDigits * select_blocks blocks. Those that have nothing to do leave at once.
template <class V>
__global__ void __launch_bounds__(kThreads, 2) select(const __grid_constant__ Tables t) {
  if (stopped(t)) return;
  const unsigned ticket = take_ticket(t.header->select);
  const Work work = all_work(t);
  const unsigned first = min(t.select_blocks, work.first);
  const unsigned later = min(t.select_blocks, work.later);
  if (ticket < first) {
    count_digit<V>(t, 0, ticket, first);
  } else if (later != 0 && ticket - first < (kDigits<V> - 1) * later) {
    const unsigned rank = ticket - first;
    count_digit<V>(t, 1 + rank / later, rank % later, later);
  }
}

}  // namespace pycomm::cuda
