// Decodes the packets of all ranks into a sum, or an update of the parameters, in one launch.
//
// A warp processes a run of tiles of kWidth positions, with a cursor into every packet. For each
// tile it reads the packets in list order, so every element is summed in rank order. No two lanes
// write the same element, because a packet has an index once. Indices out of range are skipped.
//
//             tile 0    tile 1         cursors point to the start of the next tile
//   packet 0  3 17      40 41 50       the lanes read 32 entries at a time
//   packet 1  17        44
//   sums      [3] [17]  [40] [41] [44] [50], then written
#pragma once

#include "cuda/numbers.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kDecodeThreads = 128;
inline constexpr unsigned kWidth = 1024;
inline constexpr unsigned kMostPackets = 512;
inline constexpr unsigned kMostArrays = 512;

struct Entries {
  const int32_t* indices;
  const void* values;
  unsigned count;
};
struct Entry {
  void* data;
  unsigned first;  // its first position
};
// Launch arguments, so that they need no device memory.
struct Decoding {
  unsigned packet_count, array_count;
  unsigned begin, end;  // positions of these arrays
  unsigned run;         // tiles of a warp
  Entries packets[kMostPackets];
  Entry arrays[kMostArrays];
};
static_assert(sizeof(Decoding) <= 32000);

template <class Real>
struct Sums {
  Real* sum;         // [kWidth]
  unsigned* there;   // [kWidth / 32] bits: whether there is a sum
  unsigned* cursor;  // [packets]

  __host__ __device__ static unsigned bytes(unsigned packets) {
    return (kWidth * sizeof(Real) + kWidth / 8 + packets * 4 + 15) / 16 * 16;
  }
};

__device__ __forceinline__ unsigned lower_bound(const Entries& packet, int64_t position) {
  unsigned low = 0, high = packet.count;
  while (low < high) {
    const unsigned middle = low + (high - low) / 2;
    if (packet.indices[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Adds the entries of one packet in [low, high); advances its cursor. Called by a warp.
template <class V, class Real>
__device__ __forceinline__ void add_packet(const Entries& packet, unsigned& cursor,
                                           const Sums<Real>& sums, int64_t low, int64_t high) {
  const unsigned lane = gpu::lane_id();
  unsigned at = cursor, taken = 32;
  while (taken == 32) {
    const bool some = at + lane < packet.count;
    const int64_t index = some ? gpu::load(&packet.indices[at + lane]) : high;
    if (index >= low && index < high) {
      const unsigned i = static_cast<unsigned>(index - low);
      const Real value =
          static_cast<Real>(widen(gpu::load(&static_cast<const V*>(packet.values)[at + lane])));
      const unsigned bit = 1u << (i % 32);
      const bool more = (atomicOr(&sums.there[i / 32], bit) & bit) != 0;
      sums.sum[i] = more ? add(sums.sum[i], value) : value;
    }
    taken = static_cast<unsigned>(__popc(__ballot_sync(gpu::kFullWarp, some && index < high)));
    at += taken;
  }
  __syncwarp();
  if (lane == 0) cursor = at;
  __syncwarp();
}

// Writes the part of a tile within its array, four elements at a time if aligned. Returns the
// number of elements. Called by a warp.
template <class T, class Real>
__device__ __forceinline__ unsigned store_quads(const Decoding& d, unsigned array,
                                                const Sums<Real>& sums, int64_t low, int64_t high,
                                                Real scale) {
  T* const to = static_cast<T*>(d.arrays[array].data) + (low - d.arrays[array].first);
  if (reinterpret_cast<uintptr_t>(to) % (sizeof(T) < 4 ? 4 * sizeof(T) : 16) != 0) return 0;
  const int64_t end =
      array + 1 < d.array_count ? min(high, static_cast<int64_t>(d.arrays[array + 1].first)) : high;
  const unsigned whole = static_cast<unsigned>(end - low) / 4 * 4;
  for (unsigned i = 4 * gpu::lane_id(); i < whole; i += 128) {
    Quad<T> quad;
#pragma unroll
    for (unsigned e = 0; e < 4; ++e) {
      const bool there = sums.there[i / 32] >> (i % 32 + e) & 1;
      quad.at[e] = narrow<T>(there ? multiply(scale, sums.sum[i + e]) : Real{0});
    }
    store_quad(to + i, quad);
  }
  return whole;
}

// kUpdate: param = fma(-lr, scale * sum, param) if a packet has the element; else out = scale *
// sum, 0 without a packet.
template <bool kUpdate, class T, class V>
__global__ void __launch_bounds__(kDecodeThreads)
    decode(const __grid_constant__ Decoding d, Wide<T> scale, Wide<T> lr) {
  using Real = Wide<T>;
  const unsigned lane = gpu::lane_id(), warp = threadIdx.x / 32;
  char* const mine = gpu::dynamic_shared<char>() + warp * Sums<Real>::bytes(d.packet_count);
  const Sums<Real> sums{reinterpret_cast<Real*>(mine),
                        reinterpret_cast<unsigned*>(mine + kWidth * sizeof(Real)),
                        reinterpret_cast<unsigned*>(mine + kWidth * sizeof(Real) + kWidth / 8)};
  const uint64_t first = uint64_t{blockIdx.x * (kDecodeThreads / 32) + warp} * d.run * kWidth;
  const int64_t start = static_cast<int64_t>(d.begin + first);
  const int64_t stop = min(static_cast<int64_t>(d.end), start + int64_t{d.run} * kWidth);
  for (unsigned p = lane; p < d.packet_count; p += 32)
    sums.cursor[p] = lower_bound(d.packets[p], start);
  unsigned array = 0;
  for (int64_t low = start; low < stop; low += kWidth) {
    const int64_t high = min(stop, low + int64_t{kWidth});
    sums.there[lane] = 0;
    static_assert(kWidth / 32 == 32, "a lane for each word");
    __syncwarp();
    for (unsigned p = 0; p < d.packet_count; ++p)
      add_packet<V>(d.packets[p], sums.cursor[p], sums, low, high);
    while (array + 1 < d.array_count && d.arrays[array + 1].first <= low) ++array;
    const unsigned whole = kUpdate ? 0 : store_quads<T>(d, array, sums, low, high, scale);
    for (unsigned i = whole + lane; low + i < high; i += 32) {
      const unsigned position = static_cast<unsigned>(low) + i;
      const bool there = sums.there[i / 32] >> (i % 32) & 1;
      if (kUpdate && !there) continue;
      while (array + 1 < d.array_count && d.arrays[array + 1].first <= position) ++array;
      T* const to = static_cast<T*>(d.arrays[array].data) + (position - d.arrays[array].first);
      const Real sum = there ? multiply(scale, sums.sum[i]) : Real{0};
      if constexpr (kUpdate)
        *to = narrow<T>(fused(-lr, sum, widen(*to)));
      else
        gpu::store(to, narrow<T>(sum));
    }
    __syncwarp();
  }
}

}  // namespace pycomm::cuda
