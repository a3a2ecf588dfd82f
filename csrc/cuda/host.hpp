// Host code of every kernel: errors, the current device, and dtypes as types.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <span>
#include <string>
#include <type_traits>

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

// Whether this process has a context on the device.
inline bool has_context(int device) {
  static const auto get_state =
      driver_function<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 1;
  return get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

// Makes the device of a call the thread's current one during its lifetime. Required by every CUDA
// call that may create a context, which would be on the current device. Afterwards the thread stays
// on the device if this process has no context on the one before: cudaSetDevice would create it,
// which takes hundreds of megabytes.
class OnDevice {
 public:
  explicit OnDevice(kernels::Queue queue) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != queue.device) check_cuda(cudaSetDevice(queue.device), "cudaSetDevice");
    changed_ = before_ != queue.device;
  }
  ~OnDevice() {
    if (changed_ && has_context(before_)) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
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

template <class... P, class... A>
void launch(const char* what, void (*kernel)(P...), const gpu::Launch& shape, A&&... arguments) {
  check_cuda(gpu::launch(kernel, shape, std::forward<A>(arguments)...), what);
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
