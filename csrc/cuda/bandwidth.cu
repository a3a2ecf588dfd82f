// A block takes a tile of 4096 elements, a thread four rows of 16 bytes. All loads of a thread are
// issued before the first result is used, as in the pass of a step (update.cuh).
#include "cuda/bandwidth.h"
#include "cuda/host.hpp"

namespace pycomm::cuda {
namespace {

constexpr unsigned kThreads = 256, kRows = 4;
constexpr size_t kTile = size_t{kThreads} * kRows * 4;  // elements

// Calls quads(at) if the block has a whole tile, whose rows have four elements of this thread each,
// the first at `at`; in the last tile one(i) for each of its elements.
template <class F, class G>
__device__ __forceinline__ void each_tile(size_t count, F quads, G one) {
  const size_t begin = blockIdx.x * kTile;
  if (begin + kTile <= count)
    quads(begin + threadIdx.x * 4);
  else
    for (size_t i = begin + threadIdx.x; i < count; i += kThreads) one(i);
}

__device__ __forceinline__ size_t row_at(size_t at, unsigned row) {
  return at + size_t{row} * kThreads * 4;
}

struct TileRows {
  Quad<float> at[kRows];
};

__device__ __forceinline__ TileRows load_rows(const float* from, size_t at) {
  TileRows rows;
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) rows.at[r] = load_quad(from + row_at(at, r));
  return rows;
}

__device__ __forceinline__ void store_rows(float* to, size_t at, const TileRows& rows) {
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) store_quad(to + row_at(at, r), rows.at[r]);
}

__global__ void __launch_bounds__(kThreads)
    step_loop(const float* grad, float* u, float* v, size_t count) {
  each_tile(
      count,
      [&](size_t at) {
        const TileRows g = load_rows(grad, at);
        TileRows a = load_rows(u, at), b = load_rows(v, at);
#pragma unroll
        for (unsigned r = 0; r < kRows; ++r) {
#pragma unroll
          for (unsigned e = 0; e < 4; ++e) {
            a.at[r].at[e] = add(a.at[r].at[e], g.at[r].at[e]);
            b.at[r].at[e] = add(b.at[r].at[e], a.at[r].at[e]);
          }
        }
        store_rows(u, at, a);
        store_rows(v, at, b);
      },
      [&](size_t i) {
        const float moved = add(u[i], grad[i]);
        u[i] = moved;
        v[i] = add(v[i], moved);
      });
}

__global__ void __launch_bounds__(kThreads) copy_loop(const float* from, float* to, size_t count) {
  each_tile(
      count, [&](size_t at) { store_rows(to, at, load_rows(from, at)); },
      [&](size_t i) { to[i] = from[i]; });
}

__global__ void __launch_bounds__(kThreads)
    read_loop(const float* x, size_t count, unsigned* most) {
  unsigned mine = 0;
  each_tile(
      count,
      [&](size_t at) {
        const TileRows rows = load_rows(x, at);
#pragma unroll
        for (unsigned r = 0; r < kRows; ++r) {
#pragma unroll
          for (unsigned e = 0; e < 4; ++e) mine = max(mine, magnitude(rows.at[r].at[e]));
        }
      },
      [&](size_t i) { mine = max(mine, magnitude(x[i])); });
  // A warp writes only if it has a larger magnitude, so most warps only read the word.
  if (mine > gpu::load_acquire(most)) atomicMax(most, mine);
}

unsigned tiles_of(size_t count) {
  return static_cast<unsigned>(std::max<size_t>((count + kTile - 1) / kTile, 1));
}

}  // namespace

void stream_step(const float* grad, float* u, float* v, size_t count, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_step", step_loop, {tiles_of(count), kThreads, stream_of(queue)}, grad, u, v,
         count);
}

void stream_copy(const float* from, float* to, size_t count, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_copy", copy_loop, {tiles_of(count), kThreads, stream_of(queue)}, from, to, count);
}

void stream_read(const float* x, size_t count, unsigned* most, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_read", read_loop, {tiles_of(count), kThreads, stream_of(queue)}, x, count, most);
}

}  // namespace pycomm::cuda
