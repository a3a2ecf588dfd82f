// Host code of every kernel: errors, the current device, and dtypes as types.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "core/errors.h"
#include "core/visit_float.h"
#include "cuda/numbers.cuh"
#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// A version of CUDA as "12.8".
inline std::string version_text(int code) {
  return std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10);
}

// What a user can do about an error of the installation; empty for other errors.
inline std::string remedy_for(cudaError_t error) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  const std::string versions = "NVIDIA's driver supports CUDA " + version_text(driver) +
                               ", and pycomm._cuda was built with CUDA " +
                               version_text(CUDART_VERSION);
  const bool no_driver = error == cudaErrorInsufficientDriver && driver == 0;
  if (error == cudaErrorNoDevice || no_driver) return "CUDA arrays need NVIDIA's driver and a GPU";
  if (error == cudaErrorInsufficientDriver)
    return versions + ": install a newer driver, or build with an older toolkit";
  if (error == cudaErrorUnsupportedPtxVersion)
    return versions +
           ": install a newer driver, or build for this GPU with CUDAARCHS (90 for compute "
           "capability 9.0)";
  if (error == cudaErrorNoKernelImageForDevice)
    return "pycomm._cuda was built for other GPUs: build it with CUDAARCHS for this one (90 for "
           "compute capability 9.0)";
  if (error == cudaErrorDevicesUnavailable)
    return "another process uses the GPU, and its compute mode allows one: end that process, or "
           "set the mode with nvidia-smi -c DEFAULT";
  if (error == cudaErrorSystemDriverMismatch)
    return "NVIDIA's kernel module and libcuda.so.1 have different versions: load the module of "
           "the installed driver, for example by a restart";
  if (error == cudaErrorSystemNotReady)
    return "a service of NVIDIA's driver does not run: with NVSwitch, start nvidia-fabricmanager";
  return {};
}

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  const std::string text = std::string(what) + ": " + cudaGetErrorString(error);
  const std::string remedy = remedy_for(error);
  if (!remedy.empty()) throw Unsupported(text + "; " + remedy);
  throw InternalError(text);
}

// A driver function without a runtime equivalent, looked up at run time so that no driver is
// linked; null if the driver lacks it.
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
             "cudaGetDriverEntryPointByVersion");
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}
template <class Function>
Function required_function(const char* name, unsigned version) {
  const auto found = driver_function<Function>(name, version);
  if (found == nullptr) throw Unsupported(std::string("NVIDIA's driver has no ") + name);
  return found;
}

// The device's primary context, which this process retains from now on.
inline CUcontext primary_context(int device) {
  static std::mutex mutex;
  static auto& retained = *new std::map<int, CUcontext>;  // never destroyed
  const std::lock_guard lock(mutex);
  CUcontext& context = retained[device];
  if (context != nullptr) return context;
  const auto call = [](const char* name, CUresult result) {
    check_cuda(static_cast<cudaError_t>(result), name);  // the numbers of the two agree
  };
  call("cuInit", required_function<PFN_cuInit_v2000>("cuInit", 2000)(0));
  const auto retain =
      required_function<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain", 7000);
  call("cuDevicePrimaryCtxRetain", retain(&context, device));
  return context;
}

// Makes the device of a call the thread's current one during its lifetime, by the driver's stack of
// contexts: cudaSetDevice could not restore a context that is no primary one, and would create one
// on the device before. Required by every CUDA call that needs a context.
class OnDevice {
 public:
  explicit OnDevice(kernels::Queue queue) {
    static const auto get = required_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
    static const auto push =
        required_function<PFN_cuCtxPushCurrent_v4000>("cuCtxPushCurrent", 4000);
    const CUcontext context = primary_context(queue.device);
    CUcontext before = nullptr;
    pushed_ = get(&before) != CUDA_SUCCESS || before != context;
    if (pushed_) check_cuda(static_cast<cudaError_t>(push(context)), "cuCtxPushCurrent");
  }
  ~OnDevice() {
    static const auto pop = driver_function<PFN_cuCtxPopCurrent_v4000>("cuCtxPopCurrent", 4000);
    CUcontext popped = nullptr;
    if (pushed_) (void)pop(&popped);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
};

// Number of multiprocessors of the current device.
inline unsigned multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return static_cast<unsigned>(count);
}

inline bool is_aligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Number of blocks of `threads` for `count` items, at most a few per multiprocessor.
inline unsigned blocks_for(size_t count, unsigned threads) {
  const size_t needed = (count + threads - 1) / threads;
  return static_cast<unsigned>(std::clamp<size_t>(needed, 1, size_t{16} * multiprocessors()));
}

template <class T>
struct Type {
  using type = T;
};

template <Dtype kDtype>
using FloatOf = std::conditional_t<
    kDtype == Dtype::float16, Half,
    std::conditional_t<kDtype == Dtype::bfloat16, Bfloat16,
                       std::conditional_t<kDtype == Dtype::float64, double, float>>>;

// Calls f(Type<T>{}) with the C++ type of a float dtype.
template <class F>
void with_float(Dtype dtype, F f) {
  visit_float(dtype, [&](auto constant) { f(Type<FloatOf<decltype(constant)::value>>{}); });
}

// The same for u and v: float32 or float64.
template <class F>
void with_wide(Dtype dtype, F f) {
  visit_real(dtype, [&](auto constant) { f(Type<FloatOf<decltype(constant)::value>>{}); });
}

// Every kernel that launch() may launch.
inline std::vector<const void*>& all_kernels() {
  static auto& all = *new std::vector<const void*>;  // never destroyed
  return all;
}
template <auto kKernel>
inline const bool registered =  // before main()
    (all_kernels().push_back(reinterpret_cast<const void*>(kKernel)), true);

// Throws Unsupported if the build has no code of it for the current device.
inline void load_kernel(const void* kernel) {
  cudaFuncAttributes found{};
  check_cuda(cudaFuncGetAttributes(&found, kernel), "cudaFuncGetAttributes");
}

template <auto kKernel, class... A>
void launch(const char* what, const gpu::Launch& shape, A&&... arguments) {
  (void)registered<kKernel>;
  check_cuda(gpu::launch(kKernel, shape, std::forward<A>(arguments)...), what);
}

// Calls f(Type<Few>{} or Type<Many>{}, part) for parts of `rows` that fit into the arguments of a
// launch.
template <class Few, class Many, class Row, class F>
void for_each_launch(std::span<const Row> rows, F f) {
  while (!rows.empty()) {
    const auto part = rows.first(std::min<size_t>(rows.size(), Many::kMost));
    if (part.size() <= Few::kMost)
      f(Type<Few>{}, part);
    else
      f(Type<Many>{}, part);
    rows = rows.subspan(part.size());
  }
}

inline cudaStream_t stream_of(kernels::Queue queue) {
  return static_cast<cudaStream_t>(queue.stream);
}

}  // namespace pycomm::cuda
