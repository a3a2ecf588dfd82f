// Streams, events, memory and the reduction kernel for the stream engine, over the CUDA runtime.
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>

#include "cuda/cuda_device.h"
#include "cuda/host.hpp"
#include "cuda/host_word.hpp"
#include "cuda/reduce.hpp"

namespace pycomm::cuda {
namespace {

cudaStream_t raw_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t raw_event(void* event) { return static_cast<cudaEvent_t>(event); }

// For destruction: at the end of a process there may be no driver any more.
template <class Call>
void quietly(int device, Call call) noexcept {
  try {
    const OnDevice on({.device = device});
    (void)call();
  } catch (const Error&) {  // see above; what would be destroyed is gone with the driver
  }
}

class CudaDevice final : public device::Device {
 public:
  CudaDevice(int index, std::function<void()> empty_caches)
      : index_(index), empty_caches_(std::move(empty_caches)) {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (index < 0 || index >= count)
      throw Unsupported("no CUDA device " + std::to_string(index) + ": " + std::to_string(count) +
                        " are visible");
    // CUDA loads a kernel at its first launch otherwise, which may wait for the device while a
    // kernel of NCCL waits there for a peer.
    const OnDevice on({.device = index});
    std::ranges::for_each(all_kernels(), load_kernel);
  }

  int index() const override { return index_; }
  std::string bus_id() override {
    std::array<char, 32> text{};
    check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), index_),
               "cudaDeviceGetPCIBusId");
    return text.data();
  }
  std::string description() override {
    int driver = 0, runtime = 0;
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    return std::string(properties.name) + ", " + bus_id() + ", capability " +
           std::to_string(properties.major) + "." + std::to_string(properties.minor) + ", driver " +
           version_text(driver) + ", runtime " + version_text(runtime);
  }
  int multiprocessors() override {
    const OnDevice on({.device = index_});
    return static_cast<int>(cuda::multiprocessors());
  }
  void while_current(const std::function<void()>& body) override {
    const OnDevice on({.device = index_});
    body();
  }

  void* make_stream() override {
    const OnDevice on({.device = index_});
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
    return stream;
  }
  void drop_stream(void* stream) noexcept override {
    quietly(index_, [=] { return cudaStreamDestroy(raw_stream(stream)); });
  }
  bool capturing(void* stream) override {
    if (stream == nullptr) return false;  // CUDA does not capture the default stream
    const OnDevice on({.device = index_});
    cudaStreamCaptureStatus status{};
    check_cuda(cudaStreamIsCapturing(raw_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void finish(void* stream) noexcept override {
    quietly(index_, [=] { return cudaStreamSynchronize(raw_stream(stream)); });
  }

  void* make_event() override {
    const OnDevice on({.device = index_});
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
    return event;
  }
  void drop_event(void* event) noexcept override {
    quietly(index_, [=] { return cudaEventDestroy(raw_event(event)); });
  }
  void record(void* event, void* stream) override {
    const OnDevice on({.device = index_});  // whose default stream a null one is
    check_cuda(cudaEventRecord(raw_event(event), raw_stream(stream)), "cudaEventRecord");
  }
  void wait(void* stream, void* event) override {
    const OnDevice on({.device = index_});
    check_cuda(cudaStreamWaitEvent(raw_stream(stream), raw_event(event), 0), "cudaStreamWaitEvent");
  }
  // Relaxed mode, because a query by a thread in another mode would invalidate a capture of another
  // thread in the mode that torch uses.
  bool passed(void* event) override {
    const OnDevice on({.device = index_});
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const cudaError_t state = cudaEventQuery(raw_event(event));
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaEventQuery");
    return true;
  }

  void* allocate(size_t bytes) override {
    const OnDevice on({.device = index_});
    void* memory = nullptr;
    cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation && empty_caches_) {
      empty_caches_();
      error = cudaMalloc(&memory, bytes);
    }
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();  // so that no later call reports it
      size_t free = 0, total = 0;
      check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      throw InternalError("device " + std::to_string(index_) + " has no memory for " +
                          std::to_string(bytes) + " bytes of scratch: " + std::to_string(free) +
                          " of " + std::to_string(total) + " bytes are free");
    }
    check_cuda(error, "cudaMalloc");
    return memory;
  }
  void release(void* memory) noexcept override {
    quietly(index_, [=] { return cudaFree(memory); });
  }

  void* allocate_host(size_t bytes) override {
    const OnDevice on({.device = index_});
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return memory;
  }
  void release_host(void* memory) noexcept override {
    quietly(index_, [=] { return cudaFreeHost(memory); });
  }

  void call(void* stream, void (*body)(void*), void* data) override {
    const OnDevice on({.device = index_});
    check_cuda(cudaLaunchHostFunc(raw_stream(stream), body, data), "cudaLaunchHostFunc");
  }
  void wait_until(void* stream, const uint32_t* at, uint32_t value) override {
    wait_for_host_word(at, value, {index_, stream});
  }

  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    const OnDevice on({.device = index_});
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, raw_stream(stream)),
               "cudaMemcpyAsync");
  }
  void clear(void* to, size_t bytes, void* stream) override {
    const OnDevice on({.device = index_});
    check_cuda(cudaMemsetAsync(to, 0, bytes, raw_stream(stream)), "cudaMemsetAsync");
  }
  void reduce(const device::Reduction& r, void* stream) override {
    reduce_into({r.out, r.count, r.dtype}, r.inputs, {r.op, static_cast<unsigned>(r.size)},
                {index_, stream});
  }

 private:
  int index_;
  std::function<void()> empty_caches_;
};

}  // namespace

std::shared_ptr<device::Device> open_device(int index, std::function<void()> empty_caches) {
  return std::make_shared<CudaDevice>(index, std::move(empty_caches));
}

}  // namespace pycomm::cuda
