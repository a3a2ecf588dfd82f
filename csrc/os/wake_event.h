// An event that wakes a thread in poll(), with one descriptor for all sockets that wake it too.
#pragma once

#include <poll.h>

#include <chrono>
#include <memory>
#include <vector>

#include "os/fd.h"

namespace pycomm::os {

// Any thread may call.
class WakeEvent {
 public:
  WakeEvent();  // throws if this process may open no further descriptor
  // Readable from notify() to clear(), and while a watched socket is readable or closed.
  int descriptor() const { return epoll_.get(); }
  void notify() const noexcept;
  void clear() const noexcept;

  // poll() and wait() set `readable` of each watched socket that is readable or closed. Watch a
  // socket once, and call unwatch() before it is closed.
  //
  // A thread that polls a Unix socket itself is moved to the processor of the sender, because the
  // kernel expects the sender to sleep next (a wake-up with WF_SYNC); a thread that polls this
  // descriptor stays where it was.
  void watch(int socket, bool& readable) const;
  void unwatch(int socket) const noexcept;

  // poll(2) for `polled` and this event. wait() clears it first, so that only sockets end it.
  int poll(std::vector<pollfd>& polled, std::chrono::milliseconds limit) const;
  void wait(std::vector<pollfd>& polled, std::chrono::milliseconds limit) const {
    clear();
    (void)poll(polled, limit);
  }

 private:
  void wait_for_readable(unsigned events) const noexcept;

  Fd epoll_;
  std::shared_ptr<const Fd> readable_;  // see readable_descriptor()
};

}  // namespace pycomm::os
