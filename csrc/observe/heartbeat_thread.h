// A thread that calls a function at a fixed interval until join(). It sends a group's heartbeats
// while the rank is busy outside of calls, and polls a device group's enqueued calls.
// It runs no user code and takes no Python lock. Each group has its own: 200 idle ones take 0.3 %
// of a processor, and a beat that waits delays those of no other group.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace pycomm::observe {

class HeartbeatThread {
 public:
  HeartbeatThread() = default;
  HeartbeatThread(const HeartbeatThread&) = delete;
  HeartbeatThread& operator=(const HeartbeatThread&) = delete;
  ~HeartbeatThread() { join(); }

  // Calls `beat` every `interval` on a new thread until it returns false or join() is called. Call
  // once.
  void start(std::chrono::nanoseconds interval, std::function<bool()> beat);
  // Ends the thread and waits for it. May be called repeatedly, from any other thread.
  void join() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace pycomm::observe
