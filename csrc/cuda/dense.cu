// Kernels over whole arrays: norms, clipping, casts, reductions. kernels/device_kernels.h has the
// formulas.
#include "cuda/arithmetic.cuh"
#include "cuda/block.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/host.hpp"
#include "cuda/reduce.hpp"

namespace pycomm::cuda {
namespace {

constexpr unsigned kThreads = 256;

// Whether it is aligned for quads of elements of this size.
bool has_quads(const void* p, size_t element) {
  return is_aligned(p, std::min<size_t>(16, 4 * element));
}

// ---- element-wise -------------------------------------------------------------------------------

// Over the grid: calls f(i) for quads of an array from i on, then g(i) for the remaining elements.
template <class F, class G>
__device__ __forceinline__ void each_quad(size_t count, bool quads, F f, G g) {
  const size_t thread = size_t{blockIdx.x} * kThreads + threadIdx.x;
  const size_t stride = size_t{gridDim.x} * kThreads, whole = quads ? count / 4 * 4 : 0;
  for (size_t i = thread * 4; i < whole; i += stride * 4) f(i);
  for (size_t i = whole + thread; i < count; i += stride) g(i);
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    cast_all(const From* from, To* to, size_t count, bool quads) {
  each_quad(
      count, quads,
      [&](size_t i) {
        const Quad<From> in = load_quad(from + i);
        Quad<To> out;
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) out.at[e] = narrow<To>(widen(in.at[e]));
        store_quad(to + i, out);
      },
      [&](size_t i) { gpu::store(to + i, narrow<To>(widen(gpu::load(from + i)))); });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    multiply_all(T* x, const Wide<T>* factor, size_t count, bool quads) {
  const Wide<T> by = *factor;
  if (by == Wide<T>{1}) return;
  each_quad(
      count, quads,
      [&](size_t i) {
        Quad<T> all = load_quad(x + i);
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) all.at[e] = narrow<T>(multiply(widen(all.at[e]), by));
        store_quad(x + i, all);
      },
      [&](size_t i) { gpu::store(x + i, narrow<T>(multiply(widen(gpu::load(x + i)), by))); });
}

// ---- reductions ---------------------------------------------------------------------------------

constexpr unsigned kMostInputs = 1024;

struct Inputs {
  const void* at[kMostInputs];
  unsigned count;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    reduce_all(T* out, const __grid_constant__ Inputs inputs, Reducing what, size_t count,
               bool quads) {
  const ReduceOp op = what.op;
  using Sum = decltype(to_sum(T{}));
  each_quad(
      count, quads,
      [&](size_t i) {
        Sum sum[4] = {};
        for (unsigned j = 0; j < inputs.count; ++j) {
          const Quad<T> in = load_quad(static_cast<const T*>(inputs.at[j]) + i);
#pragma unroll
          for (unsigned e = 0; e < 4; ++e)
            sum[e] = j == 0 ? to_sum(in.at[e]) : join(op, sum[e], to_sum(in.at[e]));
        }
        Quad<T> result;
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) result.at[e] = from_sum<T>(op, sum[e], what.size);
        store_quad(out + i, result);
      },
      [&](size_t i) {
        Sum sum{};
        for (unsigned j = 0; j < inputs.count; ++j) {
          const auto x = to_sum(gpu::load(static_cast<const T*>(inputs.at[j]) + i));
          sum = j == 0 ? x : join(op, sum, x);
        }
        gpu::store(out + i, from_sum<T>(op, sum, what.size));
      });
}

// ---- norms --------------------------------------------------------------------------------------

constexpr unsigned kLanes = 128;
constexpr unsigned kNormTile = 4096;
constexpr unsigned kMostArrays = 1024;

// Launch arguments: each array, and the index of its first tile among all tiles.
struct NormPage {
  unsigned count;
  struct {
    const void* data;
    size_t count;
    unsigned first_tile;
  } arrays[kMostArrays];
};
static_assert(sizeof(NormPage) <= 32000);

struct LaneSpace {
  double at[kLanes];
};

// Adds the lanes in pairs; the sum in all threads.
__device__ __forceinline__ double add_lanes(double lane) {
  auto& lanes = gpu::shared<LaneSpace>().at;
  lanes[threadIdx.x] = lane;
  __syncthreads();
  for (unsigned width = kLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width)
      lanes[threadIdx.x] = __dadd_rn(lanes[threadIdx.x], lanes[threadIdx.x + width]);
    __syncthreads();
  }
  const double sum = lanes[0];
  __syncthreads();
  return sum;
}

// Grid: one block per tile; the sum of its squares.
template <class T>
__global__ void __launch_bounds__(kLanes)
    square_tiles(const __grid_constant__ NormPage page, double* sums) {
  const unsigned tile = blockIdx.x;
  const unsigned at =
      find_last(page.count, tile, [&](unsigned i) { return page.arrays[i].first_tile; });
  const auto& array = page.arrays[at];
  const size_t begin = size_t{tile - array.first_tile} * kNormTile;
  const size_t end = begin + kNormTile < array.count ? begin + kNormTile : array.count;
  double lane = 0;
  for (size_t i = begin + threadIdx.x; i < end; i += kLanes) {
    const auto x = static_cast<double>(widen(gpu::load(static_cast<const T*>(array.data) + i)));
    lane = __fma_rn(x, x, lane);
  }
  const double sum = add_lanes(lane);
  if (threadIdx.x == 0) sums[tile] = sum;
}

// Grid: one block per array; sums its tiles, tile by tile, until one number remains.
__global__ void __launch_bounds__(kLanes)
    finish_norms(const __grid_constant__ NormPage page, double* sums, double* norms) {
  const auto& array = page.arrays[blockIdx.x];
  double* const mine = sums + array.first_tile;
  size_t left = (array.count + kNormTile - 1) / kNormTile;
  while (left > 1) {
    const size_t tiles = (left + kNormTile - 1) / kNormTile;
    for (size_t tile = 0; tile < tiles; ++tile) {
      double lane = 0;
      const size_t end = left < (tile + 1) * kNormTile ? left : (tile + 1) * kNormTile;
      for (size_t i = tile * kNormTile + threadIdx.x; i < end; i += kLanes)
        lane = __dadd_rn(lane, mine[i]);
      const double sum = add_lanes(lane);  // no thread reads this place again
      if (threadIdx.x == 0) mine[tile] = sum;
    }
    __syncthreads();
    left = tiles;
  }
  if (threadIdx.x == 0) norms[blockIdx.x] = array.count == 0 ? 0 : canonical(__dsqrt_rn(mine[0]));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    clip_factors(const double* norms, T* factors, unsigned count, double limit, double scale) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const double norm = norms[i];
    const double ratio = norm > 0 && norm - norm == 0 ? __ddiv_rn(limit, norm) : 1;
    factors[i] = narrow<T>(__dmul_rn(scale, ratio < 1 ? ratio : 1));
  }
}

size_t norm_tiles(const kernels::Array& array) { return (array.count + kNormTile - 1) / kNormTile; }

}  // namespace

void CudaKernels::norm(std::span<const kernels::Array> arrays, Dtype dtype, double* norms,
                       kernels::Workspace workspace, kernels::Queue queue) {
  check(norm_workspace_bytes(arrays) <= workspace.bytes, "norm: the workspace is too small");
  const OnDevice on(queue);
  auto* const sums = static_cast<double*>(workspace.data);
  for (size_t done = 0; done < arrays.size(); done += kMostArrays) {
    const auto part = arrays.subspan(done, std::min<size_t>(kMostArrays, arrays.size() - done));
    NormPage page{};
    unsigned tiles = 0;
    for (const kernels::Array& array : part) {
      page.arrays[page.count++] = {array.data, array.count, tiles};
      tiles += static_cast<unsigned>(norm_tiles(array));
    }
    if (tiles > 0)
      with_float(dtype, [&](auto type) {
        launch<square_tiles<typename decltype(type)::type>>(
            "square_tiles", {tiles, kLanes, stream_of(queue)}, page, sums);
      });
    launch<finish_norms>("finish_norms", {page.count, kLanes, stream_of(queue)}, page, sums,
                         norms + done);
  }
}

size_t CudaKernels::norm_workspace_bytes(std::span<const kernels::Array> arrays) {
  size_t tiles = 0;
  for (const kernels::Array& array : arrays) tiles += norm_tiles(array);
  return tiles * sizeof(double);
}

void CudaKernels::clip_scale(const double* norms, kernels::TypedArray factors, Clip clip,
                             kernels::Queue queue) {
  if (factors.count == 0) return;
  const OnDevice on(queue);
  with_wide(factors.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch<clip_factors<T>>("clip_factors",
                            {blocks_for(factors.count, kThreads), kThreads, stream_of(queue)},
                            norms, static_cast<T*>(factors.data),
                            static_cast<unsigned>(factors.count), clip.limit, clip.scale);
  });
}

void CudaKernels::multiply(kernels::TypedArray x, const void* factor, kernels::Queue queue) {
  if (x.count == 0) return;
  const OnDevice on(queue);
  with_float(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch<multiply_all<T>>("multiply_all",
                            {blocks_for(x.count / 4 + 1, kThreads), kThreads, stream_of(queue)},
                            static_cast<T*>(x.data), static_cast<const Wide<T>*>(factor), x.count,
                            has_quads(x.data, sizeof(T)));
  });
}

void CudaKernels::cast(kernels::TypedArray x, kernels::TypedArray out, kernels::Queue queue) {
  if (x.count == 0) return;
  const OnDevice on(queue);
  with_float(x.dtype, [&](auto from) {
    with_float(out.dtype, [&](auto to) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to)::type;
      launch<cast_all<From, To>>(
          "cast_all", {blocks_for(x.count / 4 + 1, kThreads), kThreads, stream_of(queue)},
          static_cast<const From*>(x.data), static_cast<To*>(out.data), x.count,
          has_quads(x.data, sizeof(From)) && has_quads(out.data, sizeof(To)));
    });
  });
}

void reduce_into(kernels::TypedArray out, std::span<const void* const> xs, Reducing what,
                 kernels::Queue queue) {
  check_defined(out.dtype, what.op);
  if (xs.size() > kMostInputs)
    throw Unsupported("cannot reduce " + std::to_string(xs.size()) + " arrays at once: at most " +
                      std::to_string(kMostInputs));
  if (out.count == 0 || xs.empty()) return;
  const OnDevice on(queue);
  Inputs inputs{};
  inputs.count = static_cast<unsigned>(xs.size());
  std::copy(xs.begin(), xs.end(), inputs.at);
  with_any(out.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    bool quads = has_quads(out.data, sizeof(T));
    for (const void* x : xs) quads = quads && has_quads(x, sizeof(T));
    launch<reduce_all<T>>("reduce_all",
                          {blocks_for(out.count / 4 + 1, kThreads), kThreads, stream_of(queue)},
                          static_cast<T*>(out.data), inputs, what, out.count, quads);
  });
}

void CudaKernels::reduce(kernels::TypedArray out, std::span<const void* const> xs, ReduceOp op,
                         kernels::Queue queue) {
  reduce_into(out, xs, {op, static_cast<unsigned>(xs.size())}, queue);
}

std::string why_not() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    const std::string remedy = remedy_for(error);
    return cudaGetErrorString(error) + (remedy.empty() ? "" : "; " + remedy);
  }
  if (count == 0) return "no GPU is visible";
  try {  // a kernel, which the build may lack for this GPU
    const OnDevice on({.device = 0});
    load_kernel(all_kernels().front());
  } catch (const Error& refused) {
    return refused.what();
  }
  return {};
}

}  // namespace pycomm::cuda
