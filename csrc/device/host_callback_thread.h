// Runs host work that a stream waits for, without blocking the caller's thread.
//
//   stream            ... | call | other work | wait for the flag | ...
//   callback thread             run the body, then set the flag
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
  using Body = std::function<void()>;  // must not throw

  HostCallbackThread(std::shared_ptr<Device> device, void* stream);
  ~HostCallbackThread();  // stops, and waits for the running body and for the stream
  HostCallbackThread(const HostCallbackThread&) = delete;
  HostCallbackThread& operator=(const HostCallbackThread&) = delete;

  // `body` runs when the stream reaches this point: once, or, if `captured` into a graph, in each
  // run of the graph. Work enqueued after stream_wait() starts when the body is done. Work that
  // need not wait is enqueued between the two, but no other begin(). Not thread-safe.
  void begin(Body body, bool captured);
  void stream_wait();
  // Thread-safe. No further body starts, and the stream waits for none. Returns whether one is
  // running.
  bool stop() noexcept;

 private:
  struct PendingCallback {
    HostCallbackThread* owner;
    Body body;
    bool captured;
  };
  static void arrived(void* callback);
  void take(const PendingCallback& callback);
  void work();
  void set_flag(uint32_t value);

  std::shared_ptr<Device> device_;
  void* stream_;
  uint32_t* flag_;  // 1: the stream may continue; pinned memory
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
