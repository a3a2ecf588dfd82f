// Streams, events, memory and the one kernel that the stream engine needs, over CUDA's runtime.
#include <string>

#include "cuda/cuda_device.h"
#include "cuda/host.hpp"
#include "cuda/reduce.hpp"

namespace pycomm::cuda {
namespace {

cudaStream_t raw_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t raw_event(void* event) { return static_cast<cudaEvent_t>(event); }

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (index < 0 || index >= count)
      throw Unsupported("there is no CUDA device " + std::to_string(index) + ", but " +
                        std::to_string(count) + " of them");
  }

  int index() const override { return index_; }
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
  void drop_stream(void* stream) noexcept override { (void)cudaStreamDestroy(raw_stream(stream)); }
  bool capturing(void* stream) override {
    cudaStreamCaptureStatus status{};
    check_cuda(cudaStreamIsCapturing(raw_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void* make_event() override {
    const OnDevice on({.device = index_});
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
    return event;
  }
  void drop_event(void* event) noexcept override { (void)cudaEventDestroy(raw_event(event)); }
  void record(void* event, void* stream) override {
    const OnDevice on({.device = index_});  // whose default stream a null one is
    check_cuda(cudaEventRecord(raw_event(event), raw_stream(stream)), "cudaEventRecord");
  }
  void wait(void* stream, void* event) override {
    const OnDevice on({.device = index_});
    check_cuda(cudaStreamWaitEvent(raw_stream(stream), raw_event(event), 0), "cudaStreamWaitEvent");
  }
  // Also while another thread captures a graph in the mode that torch takes, which a query by a
  // thread that is not relaxed would end.
  bool passed(void* event) override {
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
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void release(void* memory) noexcept override { (void)cudaFree(memory); }

  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, raw_stream(stream)),
               "cudaMemcpyAsync");
  }
  void clear(void* to, size_t bytes, void* stream) override {
    check_cuda(cudaMemsetAsync(to, 0, bytes, raw_stream(stream)), "cudaMemsetAsync");
  }
  void reduce(const Reduction& r, void* stream) override {
    reduce_into({r.out, r.count, r.dtype}, r.inputs, {r.op, static_cast<unsigned>(r.size)},
                {index_, stream});
  }

 private:
  int index_;
};

}  // namespace

std::shared_ptr<Device> open_device(int index) { return std::make_shared<CudaDevice>(index); }

}  // namespace pycomm::cuda
