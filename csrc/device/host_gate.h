// Work of a stream that the host lets begin. Each wait() is a gate, and open() opens the oldest
// closed one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "device/device.h"

namespace pycomm::device {

class HostGate {
 public:
  explicit HostGate(std::shared_ptr<Device> device)
      : device_(std::move(device)),
        opened_(static_cast<uint32_t*>(device_->allocate_host(sizeof(uint32_t)))) {
    std::atomic_ref(*opened_).store(0);
  }
  ~HostGate() {  // opens all, and waits for the stream
    open_forever();
    if (waits_ > 0) device_->finish(stream_);
    device_->release_host(opened_);
  }
  HostGate(const HostGate&) = delete;
  HostGate& operator=(const HostGate&) = delete;

  // Work that is enqueued on the stream from now on begins after the gate. The same stream each
  // time, which lives longer than this object. One thread at a time.
  void wait(void* stream) {
    stream_ = stream;
    device_->wait_until(stream, opened_, ++waits_);
  }
  // Any thread. May precede its wait().
  void open() noexcept { add(1); }
  // Any thread. Opens these gates and those of later waits.
  void open_forever() noexcept {
    if (!forever_.exchange(true)) add(kFarAhead);
  }

 private:
  static constexpr uint32_t kFarAhead = uint32_t{1} << 30;  // the device compares modulo 2^32
  void add(uint32_t count) noexcept {
    std::atomic_ref(*opened_).fetch_add(count, std::memory_order_release);
  }

  std::shared_ptr<Device> device_;
  void* stream_ = nullptr;
  uint32_t* opened_;  // gates; pinned memory
  uint32_t waits_ = 0;
  std::atomic<bool> forever_ = false;
};

}  // namespace pycomm::device
