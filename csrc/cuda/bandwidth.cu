// A thread moves 16 bytes of each array, a block 4096: on an H200 faster than several rows for each
// thread, and as fast as cudaMemcpyAsync. A loop that only reads needs several rows.
#include "cuda/bandwidth.h"
#include "cuda/host.hpp"

namespace pycomm::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kRow = kThreads * 4;  // elements
constexpr unsigned kReadRows = 4;

// Calls quads(at) if the block has a whole tile of `rows`, of which four elements of each are this
// thread's, the first ones from `at` on; in the last tile one(i) for each of its elements.
template <class F, class G>
__device__ __forceinline__ void each_tile(unsigned rows, size_t count, F quads, G one) {
  const size_t begin = size_t{blockIdx.x} * rows * kRow;
  if (begin + rows * kRow <= count)
    quads(begin + threadIdx.x * 4);
  else
    for (size_t i = begin + threadIdx.x; i < count; i += kThreads) one(i);
}

__global__ void __launch_bounds__(kThreads)
    step_loop(const float* grad, float* u, float* v, size_t count) {
  each_tile(
      1, count,
      [&](size_t at) {
        const Quad<float> g = load_quad(grad + at);
        Quad<float> a = load_quad(u + at), b = load_quad(v + at);
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) {
          a.at[e] = add(a.at[e], g.at[e]);
          b.at[e] = add(b.at[e], a.at[e]);
        }
        store_quad(u + at, a);
        store_quad(v + at, b);
      },
      [&](size_t i) {
        const float moved = add(u[i], grad[i]);
        u[i] = moved;
        v[i] = add(v[i], moved);
      });
}

__global__ void __launch_bounds__(kThreads) copy_loop(const float* from, float* to, size_t count) {
  each_tile(
      1, count, [&](size_t at) { store_quad(to + at, load_quad(from + at)); },
      [&](size_t i) { to[i] = from[i]; });
}

__global__ void __launch_bounds__(kThreads)
    read_loop(const float* x, size_t count, unsigned* most) {
  unsigned mine = 0;
  each_tile(
      kReadRows, count,
      [&](size_t at) {
        Quad<float> rows[kReadRows];  // all are loaded before the first is used
#pragma unroll
        for (unsigned r = 0; r < kReadRows; ++r) rows[r] = load_quad(x + at + r * kRow);
#pragma unroll
        for (unsigned r = 0; r < kReadRows; ++r) {
#pragma unroll
          for (unsigned e = 0; e < 4; ++e) mine = max(mine, magnitude(rows[r].at[e]));
        }
      },
      [&](size_t i) { mine = max(mine, magnitude(x[i])); });
  // A warp writes only if it has a larger magnitude, so most warps only read the word.
  if (mine > gpu::load_acquire(most)) atomicMax(most, mine);
}

unsigned tiles_of(size_t count, unsigned rows) {
  const size_t tile = size_t{rows} * kRow;
  return static_cast<unsigned>(std::max<size_t>((count + tile - 1) / tile, 1));
}

}  // namespace

void stream_step(const float* grad, float* u, float* v, size_t count, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_step", step_loop, {tiles_of(count, 1), kThreads, stream_of(queue)}, grad, u, v,
         count);
}

void stream_copy(const float* from, float* to, size_t count, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_copy", copy_loop, {tiles_of(count, 1), kThreads, stream_of(queue)}, from, to,
         count);
}

void stream_read(const float* x, size_t count, unsigned* most, kernels::Queue queue) {
  const OnDevice device(queue);
  launch("stream_read", read_loop, {tiles_of(count, kReadRows), kThreads, stream_of(queue)}, x,
         count, most);
}

}  // namespace pycomm::cuda
