// What CUB does for the k largest magnitudes, behind C functions: libraries.py compiles this with
// nvcc and loads it. CUB comes with the toolkit; from 3.3 on it has DeviceTopK, before that one
// sorts. No part of the package.
#include <cuda_runtime.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cstddef>
#include <cub/version.cuh>

#if CUB_VERSION >= 300300
#include <cub/device/device_topk.cuh>
#else
#include <cub/device/device_radix_sort.cuh>
#endif

namespace {

struct Magnitude {
  __host__ __device__ float operator()(float x) const { return x < 0 ? -x : x; }
};

#if CUB_VERSION >= 300300

const char* const kName = "DeviceTopK";

cudaError_t largest(void* workspace, size_t& bytes, const float* x, float* magnitudes, int* indices,
                    int count, int k, cudaStream_t stream) {
  namespace execution = cuda::execution;
  const auto any = execution::require(execution::determinism::not_guaranteed,
                                      execution::output_ordering::unsorted);
  return cub::DeviceTopK::MaxPairs(workspace, bytes, thrust::make_transform_iterator(x, Magnitude{}),
                                   magnitudes, thrust::counting_iterator<int>(0), indices, count, k,
                                   cuda::std::execution::env{cuda::stream_ref{stream}, any});
}

#else

const char* const kName = "DeviceRadixSort";

__global__ void number(const float* x, float* magnitudes, int* indices, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    magnitudes[i] = Magnitude{}(x[i]);
    indices[i] = i;
  }
}

// All of them are sorted, in the front of the workspace, and the first k are copied.
cudaError_t largest(void* workspace, size_t& bytes, const float* x, float* magnitudes, int* indices,
                    int count, int k, cudaStream_t stream) {
  const size_t whole = (static_cast<size_t>(count) + 3) / 4 * 4;  // elements
  auto* keys = static_cast<float*>(workspace);
  auto* places = reinterpret_cast<int*>(keys + 2 * whole);
  void* temporary = workspace == nullptr ? nullptr : places + 2 * whole;
  size_t own = workspace == nullptr ? 0 : bytes - 16 * whole;
  cudaLaunchConfig_t shape{};
  shape.gridDim = 2048;
  shape.blockDim = 256;
  shape.stream = stream;
  cudaError_t error = cudaSuccess;
  if (workspace != nullptr) error = cudaLaunchKernelEx(&shape, number, x, keys, places, count);
  if (error != cudaSuccess) return error;
  error = cub::DeviceRadixSort::SortPairsDescending(temporary, own, keys, keys + whole, places,
                                                    places + whole, count, 0, 32, stream);
  if (workspace == nullptr) {
    bytes = own + 16 * whole;
    return error;
  }
  const auto way = cudaMemcpyDeviceToDevice;
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(magnitudes, keys + whole, k * sizeof(float), way, stream);
  if (error == cudaSuccess)
    error = cudaMemcpyAsync(indices, places + whole, k * sizeof(int), way, stream);
  return error;
}

#endif

}  // namespace

extern "C" {

const char* cub_topk_name() { return kName; }

const char* cub_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// The k largest magnitudes and their indices; with no workspace, the bytes that it needs.
int cub_topk(void* workspace, size_t* bytes, const float* x, float* magnitudes, int* indices, int count,
             int k, void* stream) {
  return largest(workspace, *bytes, x, magnitudes, indices, count, k, static_cast<cudaStream_t>(stream));
}
}
