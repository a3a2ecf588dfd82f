// Runs host work that a stream waits for, without blocking the caller's thread.
//
//   stream            ... | call | other work | wait for step 0 | ... | wait for the last step |
//   callback thread             run the body, which completes steps; its end completes all
//
// The wait occupies no hardware channel (see Device::wait_until), so that later work of other
// streams, which a peer may need before it joins the body, can start.
//
// The body runs on a thread of its own: CUDA may run the callbacks of several streams on one
// thread, so a callback that waits for another rank could block that rank.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device.h"

namespace pycomm::device {

class HostCallbackThread {
 public:
  using Body = std::function<void()>;   // must not throw
  static constexpr size_t kSteps = 64;  // of a body, at most

  HostCallbackThread(std::shared_ptr<Device> device, void* stream);
  ~HostCallbackThread();  // stops, and waits for the running body and for the stream
  HostCallbackThread(const HostCallbackThread&) = delete;
  HostCallbackThread& operator=(const HostCallbackThread&) = delete;

  // `body` runs when the stream reaches this point: once, or, if `captured` into a graph, in each
  // run of the graph. Work enqueued after stream_wait() starts when that step of the body is
  // complete, and sees what it wrote. `stream` is that of this object, or one that waits for an
  // event after begin(). The stream of this object must wait for the last step before the next
  // begin(). Not thread-safe.
  void begin(Body body, bool captured);
  void stream_wait(void* stream, size_t step);
  // For a body: completes a step before its end.
  void complete(size_t step) { set_flag(step, 1); }
  // `body` runs on a CUDA thread when the stream reaches this point: as of Device::call.
  void notify(Body body, bool captured);
  // Thread-safe. No further body starts, and the stream waits for none. Returns whether one is
  // running.
  bool stop() noexcept;

 private:
  struct PendingCallback {
    HostCallbackThread* owner;
    Body body;
    bool captured, on_cuda_thread;
  };
  static void arrived(void* callback);
  void enqueue(PendingCallback callback);
  void take(const PendingCallback& callback);
  void work();
  void set_flag(size_t step, uint32_t value);
  void set_flags(uint32_t value);

  std::shared_ptr<Device> device_;
  void* stream_;
  uint32_t* flags_;  // of each step; 1: the stream may continue; pinned memory
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Body> waiting_;
  bool stopped_ = false, ending_ = false, working_ = false;
  // Callbacks that the stream has not reached, and those of graphs, which may run as long as this
  // object lives.
  std::vector<std::unique_ptr<PendingCallback>> pending_;
  std::thread thread_;
};

}  // namespace pycomm::device
