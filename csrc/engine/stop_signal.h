// Ends or suspends the wait of another thread.
#pragma once

#include <poll.h>

#include <atomic>
#include <mutex>
#include <string>

#include "os/wake_event.h"

namespace pycomm::engine {

class StopSignal {
 public:
  // From any thread: check() throws from now on, and the descriptor is readable.
  void request(const std::string& reason) noexcept;
  // Throws GroupBroken after request().
  void check() const {
    if (requested_.load()) throw_requested();
  }
  // From any thread: ends the wait of a task that can be suspended, until resume().
  void suspend() noexcept;
  void resume() noexcept;
  bool suspended() const { return suspended_.load(); }
  pollfd to_poll() const { return {wake_.descriptor(), POLLIN, 0}; }

 private:
  [[noreturn]] void throw_requested() const;

  std::atomic<bool> requested_{false}, suspended_{false};
  os::WakeEvent wake_;
  mutable std::mutex mutex_;  // guards reason_
  std::string reason_;
};

}  // namespace pycomm::engine
