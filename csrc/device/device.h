// A GPU as the stream engine sees it: a pure interface, so that the engine is built and tested
// where there is none.
//
// Not the kernels that users call (kernels/device_kernels.h). cuda/cuda_device.cu implements it
// over CUDA's runtime, and the emulator of tests/emulator runs that same file. Streams and events
// are CUDA's own (cudaStream_t, cudaEvent_t) without its types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace pycomm {

// out[i] = inputs[0][i] (+) inputs[1][i] (+) ..., left to right, as kernels/kernels.h defines it
// for the processor, with the same bits. `size` is what avg divides by; 16-bit floats are rounded
// once. `out` may be one of the inputs.
struct Reduction {
  void* out = nullptr;
  std::span<const void* const> inputs{};
  size_t count = 0;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  int size = 1;
};

// Any thread may call. What takes a stream enqueues there and returns; nothing but
// finish() and release() waits for the device. Throws Unsupported where there is no driver or GPU,
// InternalError with CUDA's words for the rest. While a stream is captured into a graph nothing may
// be made or allocated.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual int index() const = 0;
  // The place of the GPU in its machine, by which NCCL tells devices apart: "0000:3b:00.0".
  virtual std::string bus_id() = 0;
  // Runs `body` while the device is the calling thread's current one, as NCCL wants it.
  virtual void while_current(const std::function<void()>& body) = 0;

  virtual void* make_stream() = 0;  // ordered with no other
  virtual void drop_stream(void* stream) noexcept = 0;
  virtual bool capturing(void* stream) = 0;
  virtual void finish(void* stream) noexcept = 0;  // the one that waits: until it is through

  virtual void* make_event() = 0;
  virtual void drop_event(void* event) noexcept = 0;
  virtual void record(void* event, void* stream) = 0;
  virtual void wait(void* stream, void* event) = 0;
  virtual bool passed(void* event) = 0;

  virtual void* allocate(size_t bytes) = 0;         // aligned to 256 bytes
  virtual void release(void* memory) noexcept = 0;  // waits until no stream uses it

  // Host memory that the device reads and writes itself, by the same address.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void release_host(void* memory) noexcept = 0;  // that no stream uses any more

  // `body(data)`, on a thread of CUDA's, when the stream gets there: it makes no call of CUDA's and
  // waits for no rank.
  virtual void call(void* stream, void (*body)(void*), void* data) = 0;
  // The stream waits until *at, of allocate_host(), is `value`.
  virtual void wait_until(void* stream, const uint32_t* at, uint32_t value) = 0;

  // From and to the device or memory of allocate_host().
  virtual void copy(void* to, const void* from, size_t bytes, void* stream) = 0;
  virtual void clear(void* to, size_t bytes, void* stream) = 0;
  virtual void reduce(const Reduction& reduction, void* stream) = 0;
};

// A stream and an event that end with their owner.
class Stream {
 public:
  explicit Stream(std::shared_ptr<Device> device)
      : device_(std::move(device)), raw_(device_->make_stream()) {}
  ~Stream() { device_->drop_stream(raw_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* raw() const { return raw_; }

 private:
  std::shared_ptr<Device> device_;
  void* raw_;
};

class Event {
 public:
  explicit Event(std::shared_ptr<Device> device)
      : device_(std::move(device)), raw_(device_->make_event()) {}
  ~Event() { device_->drop_event(raw_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(void* stream) { device_->record(raw_, stream); }
  void stream_wait(void* stream) {
    device_->wait(stream, raw_);
  }  // what follows there waits for it
  bool passed() { return device_->passed(raw_); }

 private:
  std::shared_ptr<Device> device_;
  void* raw_;
};

// Events that are used again, as a driver takes longer to make one than to record it. Any thread.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // Given back when nobody holds it; what waits for it on a stream by then goes on waiting.
  std::shared_ptr<Event> take() {
    const auto give_back = [pool = shared_from_this()](Event* event) { pool->keep(event); };
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return {new Event(device_), give_back};
    Event* const event = free_.back().release();
    free_.pop_back();
    return {event, give_back};
  }

 private:
  void keep(Event* event) {
    const std::lock_guard lock(mutex_);
    free_.emplace_back(event);
  }

  std::shared_ptr<Device> device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_;
};

}  // namespace pycomm
