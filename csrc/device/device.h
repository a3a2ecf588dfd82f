// The GPU interface of the stream engine. It is pure virtual, so that the engine builds and is
// tested without a GPU.
//
// cuda/cuda_device.cu implements it over the CUDA runtime, and the emulator of tests/emulator runs
// the same file. Streams and events are CUDA's own (cudaStream_t, cudaEvent_t) without its types.
// kernels/device_kernels.h has the kernels that users call.
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

namespace pycomm::device {

// out[i] = inputs[0][i] (+) inputs[1][i] (+) ..., left to right, with the same bits as
// kernels/kernels.h on the CPU. avg divides by `size`; 16-bit floats are rounded once. `out` may be
// one of the inputs.
struct Reduction {
  void* out = nullptr;
  std::span<const void* const> inputs{};
  size_t count = 0;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  int size = 1;
};

// Thread-safe. Functions that take a stream enqueue and return; only finish() and release() wait
// for the device. Throws Unsupported without a driver or GPU, InternalError with the CUDA error
// text otherwise. During a stream capture no object may be created and no memory allocated.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual int index() const = 0;
  // The PCI bus id, by which NCCL identifies devices: "0000:3b:00.0".
  virtual std::string bus_id() = 0;
  // For the log: "NVIDIA H200, 0000:3b:00.0, capability 9.0, driver 13.0, runtime 12.8".
  virtual std::string description() = 0;
  virtual int multiprocessors() = 0;
  // Runs `body` with the device as the calling thread's current one, as NCCL requires.
  virtual void while_current(const std::function<void()>& body) = 0;

  virtual void* make_stream() = 0;  // not ordered with other streams
  virtual void drop_stream(void* stream) noexcept = 0;
  virtual bool capturing(void* stream) = 0;
  virtual void finish(void* stream) noexcept = 0;  // waits until the stream is idle

  virtual void* make_event() = 0;
  virtual void drop_event(void* event) noexcept = 0;
  virtual void record(void* event, void* stream) = 0;
  virtual void wait(void* stream, void* event) = 0;
  virtual bool passed(void* event) = 0;

  virtual void* allocate(size_t bytes) = 0;         // aligned to 256 bytes
  virtual void release(void* memory) noexcept = 0;  // waits until no stream uses it

  // Pinned host memory that the device reads and writes at the same address.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void release_host(void* memory) noexcept = 0;  // no stream may use it

  // Calls `body(data)` on a CUDA thread when the stream reaches this point. It must make no CUDA
  // call and wait for no rank.
  virtual void call(void* stream, void (*body)(void*), void* data) = 0;
  // The stream waits until *at, of allocate_host(), is at least `value`, modulo 2^32. Later
  // commands of other streams must not wait behind it.
  virtual void wait_until(void* stream, const uint32_t* at, uint32_t value) = 0;

  // Source and destination: device memory or memory of allocate_host().
  virtual void copy(void* to, const void* from, size_t bytes, void* stream) = 0;
  virtual void clear(void* to, size_t bytes, void* stream) = 0;
  virtual void reduce(const Reduction& reduction, void* stream) = 0;
};

// A stream and an event that are destroyed with their owner.
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
  // Later work on `stream` waits for the event.
  void stream_wait(void* stream) { device_->wait(stream, raw_); }
  bool passed() { return device_->passed(raw_); }

 private:
  std::shared_ptr<Device> device_;
  void* raw_;
};

// A pool of events, because a driver takes longer to create an event than to record one.
// Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // The event returns to the pool with its last reference; streams that already wait for it still
  // do.
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

}  // namespace pycomm::device
