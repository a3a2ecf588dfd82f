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

template <unsigned kThreads, class Bin>
__device__ __forceinline__ Found narrow(unsigned bins, unsigned want, Bin bin) {
  auto& found = gpu::shared<Found>();
  const unsigned each = (bins + kThreads - 1) / kThreads;
  const unsigned top = bins - min(bins, threadIdx.x * each), low = top - min(top, each);
  unsigned mine = 0;
  for (unsigned b = low; b < top; ++b) mine += bin(b);
  const unsigned upto = scan_block<kThreads>(mine);
  unsigned above = upto - mine;
  if (above < want && want <= upto) {
    unsigned b = top - 1;
    for (unsigned here = bin(b); above + here < want; here = bin(b)) {
      above += here;
      --b;
    }
    found = {b, want - above};
  }
  __syncthreads();
  return found;  // valid until the barrier in the scan of the next call
}

// Several passes in one launch: blocks take tickets as they start, and `blocks` of them form a
// pass. A block waits until all earlier passes are complete. It waits only for blocks with lower
// tickets, which already run. So there is always progress, however few blocks fit on the device.
struct Turns {
  unsigned ticket;
  unsigned done;
};
struct Turn {
  unsigned pass;
  unsigned rank;  // within the pass
};

__device__ __forceinline__ Turn take_turn(Turns& turns, unsigned blocks) {
  auto& mine = gpu::shared<Turn>();
  if (threadIdx.x == 0) {
    const unsigned ticket = atomicAdd(&turns.ticket, 1u);
    const unsigned pass = ticket / blocks;
    while (gpu::load_acquire(&turns.done) < pass * blocks) gpu::pause();
    mine = {pass, ticket - pass * blocks};
  }
  __syncthreads();
  const Turn turn = mine;
  __syncthreads();
  return turn;
}

__device__ __forceinline__ void end_turn(Turns& turns) {
  __syncthreads();
  if (threadIdx.x == 0) gpu::add_release(&turns.done, 1u);
}

}  // namespace pycomm::cuda
