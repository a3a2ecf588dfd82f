// Ends the wait of another thread.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <mutex>
#include <string>

#include "os/fd.h"

namespace pycomm {

class StopSignal {
 public:
  // From any thread: check() throws from now on, and the descriptor is readable.
  void request(const std::string& reason) noexcept;
  // Throws GroupBroken after request().
  void check() const {
    if (requested_.load()) throw_requested();
  }
  pollfd to_poll() const { return {wake_.get(), POLLIN, 0}; }

 private:
  [[noreturn]] void throw_requested() const;

  std::atomic<bool> requested_{false};
  Fd wake_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  mutable std::mutex mutex_;  // guards reason_
  std::string reason_;
};

}  // namespace pycomm
