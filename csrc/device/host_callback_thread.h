// Work on the host that a stream waits for, without a thread of the caller's that waits.
//
//   stream            ... | call | other work | wait for the flag | ...
//   callback thread             run the body, then set the flag
//
// The body has a thread of its own: what CUDA calls when a stream gets there may share its thread
// with what other streams call, so that a callback that waited for another rank could block that
// rank. Called by host_staging_channel.cpp and group/host_staged_executor.cpp.
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

namespace pycomm {

class HostCallbackThread {
 public:
  using Body = std::function<void()>;  // must not throw

  HostCallbackThread(std::shared_ptr<Device> device, void* stream);
  ~HostCallbackThread();  // stops, and waits for the body that runs and for the stream
  HostCallbackThread(const HostCallbackThread&) = delete;
  HostCallbackThread& operator=(const HostCallbackThread&) = delete;

  // `body` runs each time the stream gets there: once, or, `captured` into a graph, in each run of
  // it. What is put on the stream behind stream_wait() begins when it is over; between the two
  // comes what need not wait for it, and no other begin(). One thread at a time.
  void begin(Body body, bool captured);
  void stream_wait();
  // From any thread: no body begins any more, and the stream waits for none. Whether one runs.
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
  uint32_t* flag_;  // 1: go on; in memory that the device reads
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Body> waiting_;
  bool stopped_ = false, ending_ = false, working_ = false;
  // That the stream has not come to; and those of graphs, which may run as long as this lives.
  std::vector<std::unique_ptr<PendingCallback>> pending_;
  std::thread thread_;
};

}  // namespace pycomm
