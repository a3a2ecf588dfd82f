// Searches in the indices of packets, which ascend.
#pragma once

#include "gpu.hpp"

namespace pycomm::cuda {

struct Entries {
  const int32_t* indices;
  const void* values;
  unsigned count;
};

inline constexpr unsigned kProbes = 4;  // entries that a thread reads in a round of a search

// A search in [low, high). The next round reads every `step`-th entry from `probe` on.
struct Search {
  unsigned low, high, probe, step;
};

// `bits`: log2 of the number of lanes of a search. Shifts, since a division takes many
// instructions.
__device__ __forceinline__ void spread(Search& s, unsigned bits) {
  const unsigned share = (s.high - s.low) / kProbes >> bits;
  s.probe = s.low + share;
  s.step = share + 1;
}

// The search of a position in a whole packet. Its first round reads the entries near the place that
// it has if the indices are uniform, within four standard deviations, which are at most
// sqrt(count) / 2.
__device__ __forceinline__ Search expected(const Entries& packet, float share, unsigned bits) {
  const auto digits = static_cast<unsigned>(32 - __clz(static_cast<int>(packet.count)));
  const unsigned margin = 3u << digits / 2;
  const auto at = static_cast<unsigned>(share * static_cast<float>(packet.count));
  const unsigned step = (2 * margin / kProbes >> bits) + 1;
  return {0, packet.count, at - min(at, margin), step};
}

// The first entry with at least this index. Called by a warp, of which each 2^bits lanes have one
// search.
__device__ __forceinline__ unsigned find_entry(const int32_t* indices, Search s, unsigned bits,
                                               int32_t position) {
  const unsigned lanes = 1u << bits, lane = gpu::lane_id() & (lanes - 1);
  const unsigned group = (gpu::kFullWarp >> (32 - lanes)) << (gpu::lane_id() - lane);
#pragma unroll 1
  while (__any_sync(gpu::kFullWarp, s.low < s.high)) {
    bool below[kProbes];
    int32_t found[kProbes];
#pragma unroll
    for (unsigned i = 0; i < kProbes; ++i) {
      const unsigned at = s.probe + (i * lanes + lane) * s.step;
      below[i] = at < s.high;
      found[i] = below[i] ? gpu::load(&indices[at]) : 0;
    }
    unsigned less = 0;
#pragma unroll
    for (unsigned i = 0; i < kProbes; ++i)
      less += static_cast<unsigned>(
          __popc(__ballot_sync(gpu::kFullWarp, below[i] && found[i] < position) & group));
    if (less != 0) s.low = max(s.low, s.probe + (less - 1) * s.step + 1);
    if (less < kProbes * lanes) s.high = min(s.high, s.probe + less * s.step);
    spread(s, bits);
  }
  return s.low;
}

// The same by one thread.
__device__ __forceinline__ unsigned lower_bound(const Entries& packet, int32_t position) {
  unsigned low = 0, high = packet.count;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if (packet.indices[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace pycomm::cuda
