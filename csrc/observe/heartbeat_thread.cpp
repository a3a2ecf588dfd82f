#include "observe/heartbeat_thread.h"

#include <utility>

#include "os/thread.h"

namespace pycomm::observe {

void HeartbeatThread::start(std::chrono::nanoseconds interval, std::function<bool()> beat) {
  const std::lock_guard lock(mutex_);
  thread_ = os::start_thread("pycomm-timer", [this, interval, beat = std::move(beat)] {
    std::unique_lock waiting(mutex_);
    while (!changed_.wait_for(waiting, interval, [&] { return ending_; })) {
      waiting.unlock();
      const bool more = beat();
      waiting.lock();
      if (!more) return;
    }
  });
}

void HeartbeatThread::join() noexcept {
  std::thread ended;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    ended = std::move(thread_);
  }
  changed_.notify_all();
  if (ended.joinable()) ended.join();
}

}  // namespace pycomm::observe
