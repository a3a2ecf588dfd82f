// A thread that calls a function at a fixed interval until join(). For a group whose rank is busy
// outside of calls it sends the heartbeats.
//
// It runs no code of the user's and takes no lock of Python's. Called by HostGroup and DeviceGroup.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace pycomm {

class HeartbeatThread {
 public:
  HeartbeatThread() = default;
  HeartbeatThread(const HeartbeatThread&) = delete;
  HeartbeatThread& operator=(const HeartbeatThread&) = delete;
  ~HeartbeatThread() { join(); }

  // Calls `beat` every `interval` on a thread of its own until it gives false or join(). Once.
  void start(std::chrono::nanoseconds interval, std::function<bool()> beat);
  // Returns when the thread has ended. Any number of times, from any other thread.
  void join() noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace pycomm
