// The threads that call a device group, one after the other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "core/errors.h"

namespace pycomm::device_group {

// One thread at a time inside a group; others wait for it.
class Turns {
 public:
  // Throws Timeout.
  void take(std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    if (!released_.wait_for(lock, limit, [this] { return !taken_; }))
      throw Timeout("another thread was inside calls of this group for " +
                    std::to_string(std::chrono::duration<double>(limit).count()) + " s");
    taken_ = true;
  }
  void release() {
    {
      const std::lock_guard lock(mutex_);
      taken_ = false;
    }
    released_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards taken_
  std::condition_variable released_;
  bool taken_ = false;
};

class Turn {
 public:
  Turn(Turns& turns, std::chrono::nanoseconds limit) : turns_(turns) { turns_.take(limit); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { turns_.release(); }

 private:
  Turns& turns_;
};

}  // namespace pycomm::device_group
