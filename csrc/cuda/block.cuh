// Block-wide functions: scans, searches, and tickets that order the blocks of a launch.
//
// All threads of a block must call each function, or all threads of a warp if documented.
#pragma once

#include "gpu.hpp"

namespace pycomm::cuda {

// The sum of x over the lanes of the warp, in all lanes.
template <class T>
__device__ __forceinline__ T sum_lanes(T x) {
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(gpu::kFullWarp, x, by);
  return x;
}
// Inclusive prefix sum over the lanes.
template <class T>
__device__ __forceinline__ T scan_lanes(T x) {
  for (unsigned by = 1; by < 32; by *= 2) {
    const T below = __shfl_up_sync(gpu::kFullWarp, x, by);
    if (gpu::lane_id() >= by) x += below;
  }
  return x;
}

template <class T>
struct ScanSpace {
  T sums[32];
};

// Inclusive prefix sum over the threads of the block. The caller must call __syncthreads before the
// next call.
template <unsigned kThreads, class T>
__device__ __forceinline__ T scan_block(T x) {
  auto& sums = gpu::shared<ScanSpace<T>>().sums;
  const unsigned warp = threadIdx.x / 32;
  x = scan_lanes(x);
  if (gpu::lane_id() == 31) sums[warp] = x;
  __syncthreads();
  for (unsigned w = 0; w < kThreads / 32; ++w) x += w < warp ? sums[w] : 0;
  return x;
}

// The last of `count` ascending numbers, number(0) <= x, that is not above x. Called by a warp with
// one x; two rounds of loads search a thousand numbers.
template <class Number>
__device__ __forceinline__ unsigned find_last(unsigned count, unsigned x, Number number) {
  unsigned low = 0;
  while (count > 1) {
    const unsigned step = (count + 31) / 32, at = gpu::lane_id() * step;
    const bool fits = at < count && number(low + at) <= x;
    const unsigned last =
        31u - static_cast<unsigned>(__clz(static_cast<int>(__ballot_sync(gpu::kFullWarp, fits))));
    low += last * step;
    count = min(step, count - last * step);
  }
  return low;
}

// The bin of the want-th largest entry of a histogram; 1 <= want <= number of entries.
struct Found {
  unsigned bin;
  unsigned want;  // its rank within the bin
};

inline constexpr unsigned kMostBins = 2048;  // of a histogram

template <unsigned kThreads, class Bin>
__device__ __forceinline__ Found narrow(unsigned bins, unsigned want, Bin bin) {
  constexpr unsigned kMost = (kMostBins + kThreads - 1) / kThreads;
  auto& found = gpu::shared<Found>();
  const unsigned each = (bins + kThreads - 1) / kThreads;
  const unsigned top = bins - min(bins, threadIdx.x * each);
  unsigned counts[kMost], mine = 0;  // from the thread's highest bin down
#pragma unroll
  for (unsigned j = 0; j < kMost; ++j) {
    counts[j] = j < min(each, top) ? bin(top - 1 - j) : 0;
    mine += counts[j];
  }
  const unsigned upto = scan_block<kThreads>(mine);
  unsigned above = upto - mine;
#pragma unroll
  for (unsigned j = 0; j < kMost; ++j) {
    if (above < want && want <= above + counts[j]) found = {top - 1 - j, want - above};
    above += counts[j];
  }
  __syncthreads();
  return found;  // valid until the barrier in the scan of the next call
}

struct Ticket {
  unsigned number;
};

// The block's number in the order in which blocks start. A block may wait for blocks with lower
// tickets, because they already run. So there is always progress, however few blocks fit on the
// device.
__device__ __forceinline__ unsigned take_ticket(unsigned& next) {
  auto& mine = gpu::shared<Ticket>().number;
  if (threadIdx.x == 0) mine = atomicAdd(&next, 1u);
  __syncthreads();
  const unsigned ticket = mine;
  __syncthreads();
  return ticket;
}

}  // namespace pycomm::cuda
