// Ends or suspends the wait of another thread.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "os/wake_event.h"

namespace pycomm::engine {

class StopSignal {
 public:
  // Notifies `wake`, which ends the waits.
  explicit StopSignal(const os::WakeEvent& wake) : wake_(wake) {}
  // From any thread: check() throws from now on.
  void request(const std::string& reason) noexcept;
  // Throws GroupBroken after request().
  void check() const {
    if (requested_.load()) throw_requested();
  }
  // From any thread: ends the wait of a task that can be suspended, until resume().
  void suspend() noexcept;
  void resume() noexcept;
  // For the thread that waits, which then looks for what came before: that ends no wait any more.
  void clear() noexcept;
  bool suspended() const { return suspended_.load(); }

 private:
  [[noreturn]] void throw_requested() const;

  std::atomic<bool> requested_{false}, suspended_{false};
  const os::WakeEvent& wake_;
  mutable std::mutex mutex_;  // guards reason_
  std::string reason_;
};

}  // namespace pycomm::engine
