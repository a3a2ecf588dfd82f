// The exact k-th magnitude of every selection: a radix select whose passes are one launch.
//
// Pass d counts digit d of the keys that agree with the k-th in all higher digits. The last pass
// computes the k-th magnitude, the number of equal ones among the k, and the lower bound of the
// next step. For that bound a second rank, 1.5k, is followed through the first two digits.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

// State of a rank across the digits.
template <class V>
struct Rank {
  Key<V> prefix;
  unsigned want;
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

template <class V>
__device__ __forceinline__ void follow(Rank<V>& rank, const unsigned* bins, unsigned digit) {
  const Found found = narrow<kThreads>(1u << digit_bits<V>(digit), rank.want,
                                       [&](unsigned b) { return gpu::load_fresh(&bins[b]); });
  rank.prefix |= static_cast<Key<V>>(found.bin) << digit_shift<V>(digit);
  rank.want = found.want;
}

// The rank down to which the pool should reach.
__device__ __forceinline__ unsigned reach_of(const Selection& selection) {
  return min(selection.count, selection.k + selection.k / 2 + 1);
}

// Both ranks after `digits` digits.
template <class V>
struct Ranks {
  Rank<V> kth, reach;
};

template <class V>
__device__ __forceinline__ Ranks<V> follow_all(const Tables& t, unsigned s, unsigned digits) {
  const Selection& selection = t.selections[s];
  const State& state = t.states[s];
  const unsigned items = needs_all(selection, state) ? selection.count : state.count;
  const unsigned* bins = t.bins + size_t{s} * kBins<V>;
  Ranks<V> ranks{{0, selection.k}, {0, min(items, reach_of(selection))}};
  for (unsigned d = 0; d < digits; ++d) {
    const Key<V> prefix = ranks.kth.prefix;
    follow(ranks.kth, bins + first_bin<V>(d), d);
    if (d > 1) continue;
    const bool together = agree<V>(prefix, ranks.reach.prefix, d);
    follow(ranks.reach, bins + (together ? first_bin<V>(d) : kReachBins<V>), d);
  }
  return ranks;
}

template <class V>
struct BinSpace {
  unsigned kth[1u << digit_bits<V>(0)];
  unsigned reach[1u << digit_bits<V>(1)];
};
struct ListSpace {
  unsigned first[kThreads + 1];  // unit of each selection
};

// A block's bins for the current selection.
template <class V>
struct Counter {
  const Tables& t;
  unsigned digit;
  unsigned selection = ~0u;
  Ranks<V> ranks{};

  __device__ __forceinline__ bool apart() const {
    return digit == 1 && !agree<V>(ranks.kth.prefix, ranks.reach.prefix, 1);
  }
  __device__ __forceinline__ void turn_to(unsigned s) {
    if (s == selection) return;
    flush();
    selection = s;
    auto& space = gpu::shared<BinSpace<V>>();
    ranks = follow_all<V>(t, s, digit);
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      space.kth[b] = 0;
      if (digit == 1) space.reach[b] = 0;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void flush() {
    if (selection == ~0u) return;
    auto& space = gpu::shared<BinSpace<V>>();
    unsigned* bins = t.bins + size_t{selection} * kBins<V>;
    __syncthreads();
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      if (space.kth[b] != 0) atomicAdd(&bins[first_bin<V>(digit) + b], space.kth[b]);
      if (apart() && space.reach[b] != 0) atomicAdd(&bins[kReachBins<V> + b], space.reach[b]);
    }
  }
  __device__ __forceinline__ void count(const Items<V>& items) {
    auto& space = gpu::shared<BinSpace<V>>();
    constexpr unsigned kBatch = 8;  // loads issued before the first is used
    for (unsigned first = threadIdx.x; first < items.count; first += kBatch * kThreads) {
      V batch[kBatch];
#pragma unroll
      for (unsigned j = 0; j < kBatch; ++j) {
        const unsigned i = first + j * kThreads;
        batch[j] = i < items.count ? items.value(i) : V{};
      }
#pragma unroll
      for (unsigned j = 0; j < kBatch; ++j) {
        if (first + j * kThreads >= items.count) continue;
        const Key<V> key = magnitude(batch[j]);
        if (agree<V>(key, ranks.kth.prefix, digit))
          atomicAdd(&space.kth[digit_of<V>(key, digit)], 1u);
        if (apart() && agree<V>(key, ranks.reach.prefix, 1))
          atomicAdd(&space.reach[digit_of<V>(key, 1)], 1u);
      }
    }
  }
};

// Units of work of a selection: tiles of its pool or of its pieces.
__device__ __forceinline__ unsigned units_of(const Selection& selection, const State& state) {
  if (selection.k == 0) return 0;
  return needs_all(selection, state) ? selection.tiles : (state.count + kTile - 1) / kTile;
}

template <class V>
__device__ __forceinline__ void count_digit(const Tables& t, Turn turn) {
  auto& list = gpu::shared<ListSpace>().first;
  Counter<V> counter{t, turn.pass};
  unsigned before = 0;  // units of earlier rounds of the list
  for (unsigned first = 0; first < t.selection_count; first += kThreads) {
    const unsigned mine = first + threadIdx.x;
    const unsigned units =
        mine < t.selection_count ? units_of(t.selections[mine], t.states[mine]) : 0;
    list[threadIdx.x + 1] = scan_block<kThreads>(units);
    if (threadIdx.x == 0) list[0] = 0;
    __syncthreads();
    const unsigned blocks = t.select_blocks, all = list[kThreads];
    for (unsigned unit = (turn.rank + blocks - before % blocks) % blocks; unit < all;
         unit += blocks) {
      const unsigned at = find_last(kThreads, unit, [&](unsigned i) { return list[i]; });
      const Selection& selection = t.selections[first + at];
      const unsigned here = unit - list[at];
      counter.turn_to(first + at);
      if (needs_all(selection, t.states[first + at])) {
        const unsigned tile = selection.first_tile + here;
        counter.count(items_of_tile<V>(piece_of(t, tile), tile));
      } else {
        const unsigned from = here * kTile, count = t.states[first + at].count;
        counter.count(items_of_pool<V>(t, selection, {from, min(kTile, count - from)}));
      }
    }
    before += all;
    __syncthreads();
  }
  counter.flush();
}

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
__device__ __forceinline__ void settle(const Tables& t, Turn turn) {
  for (unsigned s = turn.rank; s < t.selection_count; s += t.select_blocks) {
    const Selection& selection = t.selections[s];
    if (selection.k == 0) continue;
    const Ranks<V> ranks = follow_all<V>(t, s, kDigits<V>);
    if (threadIdx.x == 0) {
      t.states[s].kth = ranks.kth.prefix;
      t.states[s].ties = ranks.kth.want;
      if constexpr (std::is_same_v<V, Wide<V>>) t.memory[s] = look_ahead<V>(t, s, ranks);
      if (t.threshold != nullptr)
        *static_cast<V*>(t.threshold) = from_magnitude<V>(ranks.kth.prefix);
    }
  }
}

// Grid: (kDigits + 1) * select_blocks blocks. Three per multiprocessor leave 80 registers per
// thread. Without this bound ptxas uses fewer and spills; with four it spills on 12.0.
template <class V>
__global__ void __launch_bounds__(kThreads, 3) select(const __grid_constant__ Tables t) {
  const Turn turn = take_turn(t.header->select, t.select_blocks);
  if (!stopped(t)) {
    if (turn.pass < kDigits<V>)
      count_digit<V>(t, turn);
    else
      settle<V>(t, turn);
  }
  end_turn(t.header->select);
}

}  // namespace pycomm::cuda
