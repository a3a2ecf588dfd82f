// The host's interface to streams: functions that they call, shared memory, words that they wait
// for. Part of the CUDA runtime of runtime.hpp.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "fiber.hpp"
#include "grid.hpp"
#include "runtime.hpp"
#include "stream_types.hpp"

namespace {

thread_local bool inside = false;

// A host function or a grid that a stream has reached. Host functions run on a separate thread as
// in CUDA, so that ThreadSanitizer sees them.
class HostCall {
 public:
  explicit HostCall(std::function<void()> body) {
    begun_.release();
    thread_ = std::thread([this, body = std::move(body)] {
      begun_.acquire();
      try {
        body();
      } catch (...) {  // of a grid: over() throws it
        error_ = std::current_exception();
      }
      ended_.release();
      over_ = true;
    });
  }
  ~HostCall() { thread_.join(); }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  bool over() {
    if (!over_) return false;
    ended_.acquire();
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  emulator::Token begun_, ended_;
  std::exception_ptr error_;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

CUresult stream_wait_value(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_EQ) return CUDA_ERROR_INVALID_VALUE;
  auto* const word = reinterpret_cast<uint32_t*>(at);
  const auto is_set = [=] {
    if (std::atomic_ref(*word).load(std::memory_order_acquire) != value) return false;
    if (emulator::__tsan_acquire) emulator::__tsan_acquire(word);  // what its writer released
    return true;
  };
  const cudaError_t error = emulator::enqueue_polled(stream, is_set, {.channel = true});
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult get_context(CUcontext* context) {
  return *context = emulator::current_context, CUDA_SUCCESS;
}
CUresult push_context(CUcontext context) { return emulator::push_context(context), CUDA_SUCCESS; }
CUresult pop_context(CUcontext* context) {
  *context = emulator::current_context;
  return emulator::pop_context(), CUDA_SUCCESS;
}
CUresult retain_primary_context(CUcontext* context, CUdevice device) {
  if (device < 0 || device >= emulator::kDevices) return CUDA_ERROR_INVALID_DEVICE;
  return *context = emulator::primary_context(device), CUDA_SUCCESS;
}

// ThreadSanitizer sees no lock here: as in fake_nccl.cpp.
struct Loaded {
  std::atomic_flag taken;
  std::set<const void*> kernels;
  std::atomic<uint64_t> lazy = 0;

  template <class F>
  auto locked(F body) {
    while (taken.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    const auto result = body();
    taken.clear(std::memory_order_release);
    return result;
  }
};
Loaded& loaded() {
  static Loaded all;
  return all;
}

struct DriverFunction {
  std::string_view name;
  void* address;
};
const std::array kDriver{
    DriverFunction{"cuStreamWaitValue32", reinterpret_cast<void*>(&stream_wait_value)},
    DriverFunction{"cuInit", reinterpret_cast<void*>(&init)},
    DriverFunction{"cuCtxGetCurrent", reinterpret_cast<void*>(&get_context)},
    DriverFunction{"cuCtxPushCurrent", reinterpret_cast<void*>(&push_context)},
    DriverFunction{"cuCtxPopCurrent", reinterpret_cast<void*>(&pop_context)},
    DriverFunction{"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain_primary_context)}};

}  // namespace

bool emulator::inside_host_call() { return inside; }

cudaError_t emulator::enqueue_beside(cudaStream_t stream, std::function<void()> operation,
                                     Occupies occupies) {
  const auto run = [operation = std::move(operation),
                    call = std::shared_ptr<HostCall>()]() mutable {
    if (!call) call = std::make_shared<HostCall>(operation);
    if (!call->over()) return false;
    call = nullptr;  // a graph runs this again
    return true;
  };
  return enqueue_polled(stream, run, occupies);
}

uint64_t emulator::lazy_launches() { return loaded().lazy; }
void emulator::note_launch(const void* kernel) {
  if (!loaded().locked([&] { return loaded().kernels.contains(kernel); })) ++loaded().lazy;
}

extern "C" {

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* kernel) {
  emulator::use_context();
  if (emulator::options().no_image) return cudaErrorNoKernelImageForDevice;
  *found = {};
  loaded().locked([&] { return loaded().kernels.insert(kernel).second; });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return emulator::enqueue_beside(stream, [=] {
    inside = true;
    function(data);
  });
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = 12080, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {  // no GPU, so capability 0.0
  *found = {};
  std::snprintf(found->name, sizeof found->name, "emulated on the CPU");
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) {
  emulator::use_context();
  return std::free(p), cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const auto* known = std::ranges::find(kDriver, std::string_view(name), &DriverFunction::name);
  const bool is_known = known != kDriver.end();
  *found = is_known ? known->address : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
