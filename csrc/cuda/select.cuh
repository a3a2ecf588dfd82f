// The exact k-th magnitude of every selection: a radix select in one launch.
//
// Digit d of the keys that agree with the k-th in all higher digits is counted. The block that
// finishes the last unit of a selection finds the digit and publishes it; the blocks of the next
// digit wait for that. The last digit gives the k-th magnitude, the number of equal ones among the
// k, and the lower bound of the next step. For that bound a second rank, 1.5k, is followed through
// the first two digits.
//
// A selection of few units is done by one block, for all digits, in shared memory.
//
// Loops are not unrolled where a block runs once through them: the time of a small selection is
// that of loading the instructions.
#pragma once

#include "cuda/tile.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kAlone = 2;  // units that one block counts for all digits
inline constexpr unsigned kNoSelection = ~0u;

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
__device__ __forceinline__ void store_result(const Tables& t, unsigned s, const Ranks<V>& ranks) {
  t.states[s].kth = ranks.kth.prefix;
  t.states[s].ties = ranks.kth.want;
  if constexpr (std::is_same_v<V, Wide<V>>) t.memory[s] = look_ahead<V>(t, s, ranks);
  if (t.threshold != nullptr) *static_cast<V*>(t.threshold) = from_magnitude<V>(ranks.kth.prefix);
}

// The bins of a block for one digit of one selection.
template <class V>
struct Counter {
  const Tables& t;
  unsigned selection = kNoSelection;
  unsigned digit = 0;
  bool alone = false;  // no other block counts this selection
  unsigned units = 0;  // of the selection that are counted
  Ranks<V> ranks{};

  __device__ __forceinline__ bool apart() const {
    return digit == 1 && !agree<V>(ranks.kth.prefix, ranks.reach.prefix, 1);
  }
  // Begins a digit. A block that is alone has the digits before.
  __device__ __forceinline__ void begin(unsigned s, unsigned new_digit, bool is_alone) {
    selection = s;
    digit = new_digit;
    alone = is_alone;
    units = 0;
    if (digit == 0)
      ranks = first_ranks<V>(t.selections[s], t.states[s]);
    else if (!alone)
      ranks = wait_for_ranks<V>(t.states[s], digit);
    auto& space = gpu::shared<BinSpace<V>>();
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      space.kth[b] = 0;
      if (digit == 1) space.reach[b] = 0;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void count(Share<V> share, unsigned left) {
    auto& space = gpu::shared<BinSpace<V>>();
    const bool both = apart();
#pragma unroll 1
    for (unsigned r = 0; r < kRows; ++r) {
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) {
        if (place_in_tile(r) + e >= left) continue;
        const Key<V> key = magnitude(share.row[0].at[e]);
        if (agree<V>(key, ranks.kth.prefix, digit))
          atomicAdd(&space.kth[digit_of<V>(key, digit)], 1u);
        if (both && agree<V>(key, ranks.reach.prefix, 1))
          atomicAdd(&space.reach[digit_of<V>(key, 1)], 1u);
      }
      // Registers have no index: the next row moves to the first.
#pragma unroll
      for (unsigned next = 0; next + 1 < kRows; ++next) share.row[next] = share.row[next + 1];
    }
    ++units;
  }
  // Ends the digit. Of several blocks, the one that finishes the selection's last unit finds it.
  __device__ __forceinline__ void finish() {
    auto& space = gpu::shared<BinSpace<V>>();
    State& state = t.states[selection];
    unsigned* bins = t.bins + size_t{selection} * kBins<V>;
    __syncthreads();
    if (!alone && !add_bins(bins, state)) return;
    follow<V>(ranks, digit, [&](bool own, unsigned b) {
      if (alone) return own ? space.kth[b] : space.reach[b];
      return gpu::load_fresh(&bins[(own ? first_bin<V>(digit) : kReachBins<V>)+b]);
    });
    if (threadIdx.x == 0) publish(state);
  }

 private:
  // Adds the bins to those of other blocks. Returns whether all units are counted.
  __device__ __forceinline__ bool add_bins(unsigned* bins, State& state) {
    auto& space = gpu::shared<BinSpace<V>>();
    const bool both = apart();
#pragma unroll 1
    for (unsigned b = threadIdx.x; b < 1u << digit_bits<V>(digit); b += kThreads) {
      if (space.kth[b] != 0) atomicAdd(&bins[first_bin<V>(digit) + b], space.kth[b]);
      if (both && space.reach[b] != 0) atomicAdd(&bins[kReachBins<V> + b], space.reach[b]);
    }
    auto& last = gpu::shared<LastSpace>().is;
    __syncthreads();
    if (threadIdx.x == 0)
      last = gpu::add_release(&state.finished, units) + units ==
             units_of(t.selections[selection], state) * (digit + 1);
    __syncthreads();
    return last;
  }
  __device__ __forceinline__ void publish(State& state) const {
    if (digit + 1 == kDigits<V>) return store_result<V>(t, selection, ranks);
    if (alone) return;
    state.kth = ranks.kth.prefix;
    state.ties = ranks.kth.want;
    state.reach = ranks.reach.prefix;
    state.left = ranks.reach.want;
    gpu::store_release(&state.digits, digit + 1);
  }
};

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

// Units of one selection.
struct Job {
  unsigned selection, first, end;
  bool alone;
};

// The jobs of a block for a digit: every `stride`-th unit from `unit` on.
struct Jobs {
  const Tables& t;
  unsigned digit, unit, stride;
  unsigned first = 0, listed = 0, all = 0;  // the selections in the list, and their units

  // The next job; its selection is kNoSelection if there is none. Called by all threads.
  __device__ __forceinline__ Job next() {
    auto& list = gpu::shared<ListSpace>().first;
    while (unit >= all) {
      if (listed >= t.selection_count) return {kNoSelection, 0, 0, false};
      unit -= all;
      first = listed;
      listed += kThreads;
      const unsigned s = first + threadIdx.x;
      const unsigned units = s < t.selection_count ? units_of(t.selections[s], t.states[s]) : 0;
      __syncthreads();
      list[threadIdx.x + 1] = scan_block<kThreads>(shared_units(units, digit));
      if (threadIdx.x == 0) list[0] = 0;
      __syncthreads();
      all = list[kThreads];
    }
    const unsigned at = find_last(kThreads, unit, [&](unsigned i) { return list[i]; });
    const unsigned s = first + at, here = unit - list[at];
    const unsigned units = units_of(t.selections[s], t.states[s]);
    unit += stride;
    return units <= kAlone ? Job{s, 0, units, true} : Job{s, here, here + 1, false};
  }
};

template <class V>
__device__ __forceinline__ void count_units(const Tables& t, unsigned digit, unsigned rank,
                                            unsigned blocks) {
  Jobs jobs{t, digit, rank, blocks};
  Counter<V> counter{t};
  Job job{};
  bool again = false;  // the same job, for the next digit
#pragma unroll 1
  for (;;) {
    if (!again) job = jobs.next();
    const bool same = !again && job.selection == counter.selection;
    if (counter.selection != kNoSelection && !same) counter.finish();
    if (job.selection == kNoSelection) return;
#pragma unroll 1
    for (unsigned unit = job.first; unit < job.end; ++unit) {
      const Items<V> items = items_of_unit<V>(t, job.selection, unit);
      const Share<V> share = load_items(items);  // before the wait for earlier digits
      if (unit == job.first && !same)
        counter.begin(job.selection, again ? counter.digit + 1 : digit, job.alone);
      counter.count(share, items.count);
    }
    again = job.alone && counter.digit + 1 < kDigits<V>;
  }
}

// Grid: kDigits * select_blocks blocks. Those that have nothing to do leave at once.
template <class V>
__global__ void __launch_bounds__(kThreads, 2) select(const __grid_constant__ Tables t) {
  if (stopped(t)) return;
  const Work work = all_work(t);
  const unsigned first = min(t.select_blocks, work.first);
  const unsigned later = min(t.select_blocks, work.later);
  if (blockIdx.x >= first + (kDigits<V> - 1) * later) return;
  const unsigned ticket = take_ticket(t.header->select);
  const unsigned digit = ticket < first ? 0 : 1 + (ticket - first) / later;
  count_units<V>(t, digit, digit == 0 ? ticket : (ticket - first) % later,
                 digit == 0 ? first : later);
}

}  // namespace pycomm::cuda
