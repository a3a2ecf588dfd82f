// The first launch of a step: writes the tables to the workspace, zeroes the counters and sets the
// lower bound of the pool.
//
// Tables are launch arguments, so no host memory must outlive the call, and a CUDA graph contains
// them.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

// Rows of the tables. Launch arguments are limited to 32764 bytes.
template <unsigned kRowsOfPage>
struct Page {
  unsigned first_piece, piece_count;
  unsigned first_selection, selection_count;
  Piece pieces[kRowsOfPage];
  Selection selections[kRowsOfPage];
};
using SmallPage = Page<16>;
using LargePage = Page<240>;
static_assert(sizeof(LargePage) + sizeof(Tables) <= 32764);

template <class V, class AnyPage>
__device__ __forceinline__ void begin_selection(const Tables& t, const AnyPage& page, unsigned at,
                                                unsigned threads) {
  const unsigned s = page.first_selection + at;
  for (unsigned b = threadIdx.x; b < kBins<V>; b += threads) t.bins[size_t{s} * kBins<V> + b] = 0;
  if (threadIdx.x != 0) return;
  const uint64_t bound = t.memory[s].bound;
  t.selections[s] = page.selections[at];
  t.states[s] = {};
  t.states[s].bound = bound == 0 ? kNoBound : bound - 1;
}

// Grid: one block per selection of the page, at least one.
template <class V, class AnyPage>
__global__ void __launch_bounds__(kThreads)
    begin(const __grid_constant__ Tables t, const __grid_constant__ AnyPage page) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *t.header = {};
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < page.piece_count;
       i += gridDim.x * kThreads) {
    t.pieces[page.first_piece + i] = page.pieces[i];
    t.first_tiles[page.first_piece + i] = page.pieces[i].first_tile;
  }
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < t.units; i += gridDim.x * kThreads)
    t.unit_counts[i] = 0;
  if (blockIdx.x < page.selection_count) begin_selection<V>(t, page, blockIdx.x, kThreads);
}

// topk has no previous step with a lower bound, so it uses a sample. The bound is the magnitude of
// a rank in the sample such that k elements of the array are above it, with four standard
// deviations of margin.
inline constexpr unsigned kSampleThreads = 1024;
inline constexpr unsigned kSampleEach = 16;
inline constexpr unsigned kSample = kSampleThreads * kSampleEach;

struct SampleSpace {
  unsigned bins[2048];
};

// Grid: one block; one piece and one selection. `rank` 0: no element enters the pool.
template <class V>
__global__ void __launch_bounds__(kSampleThreads)
    begin_topk(const __grid_constant__ Tables t, const __grid_constant__ SmallPage page,
               unsigned rank) {
  if (threadIdx.x == 0) {
    *t.header = {};
    t.pieces[0] = page.pieces[0];
    t.first_tiles[0] = 0;
    t.memory[0] = {};
  }
  for (unsigned i = threadIdx.x; i < t.units; i += kSampleThreads) t.unit_counts[i] = 0;
  begin_selection<V>(t, page, 0, kSampleThreads);
  const unsigned count = page.pieces[0].count;
  const V* x = static_cast<const V*>(page.pieces[0].v);
  Key<V> keys[kSampleEach];
  const unsigned quads = count / 4;  // four neighbours cost no more than one element
  if (page.pieces[0].aligned && quads >= kSample / 4) {
    Quad<V> four[kSampleEach / 4];
#pragma unroll
    for (unsigned j = 0; j < kSampleEach / 4; ++j) {
      const uint64_t at = uint64_t{j * kSampleThreads + threadIdx.x} * quads / (kSample / 4);
      four[j] = load_quad(x + 4 * at);
    }
#pragma unroll
    for (unsigned j = 0; j < kSampleEach; ++j) keys[j] = magnitude(four[j / 4].at[j % 4]);
  } else {
#pragma unroll
    for (unsigned j = 0; j < kSampleEach; ++j) {
      const uint64_t at = uint64_t{j * kSampleThreads + threadIdx.x} * count / kSample;
      keys[j] = count == 0 ? Key<V>{0} : magnitude(gpu::load(&x[at]));
    }
  }
  auto& bins = gpu::shared<SampleSpace>().bins;
  Key<V> bound = 0;
#pragma unroll 1
  for (unsigned d = 0; d < kDigits<V> && rank != 0; ++d) {
    const unsigned size = 1u << digit_bits<V>(d);
    for (unsigned b = threadIdx.x; b < size; b += kSampleThreads) bins[b] = 0;
    __syncthreads();
#pragma unroll
    for (Key<V> key : keys)
      if (d == 0 || (key ^ bound) >> digit_shift<V>(d - 1) == 0)
        atomicAdd(&bins[static_cast<unsigned>(key >> digit_shift<V>(d)) & (size - 1)], 1u);
    __syncthreads();
    const Found found = narrow<kSampleThreads>(size, rank, [&](unsigned b) { return bins[b]; });
    bound |= static_cast<Key<V>>(found.bin) << digit_shift<V>(d);
    rank = found.want;
    if (threadIdx.x == 0 && d + 1 == kDigits<V>) t.states[0].bound = bound;
  }
}

}  // namespace pycomm::cuda
