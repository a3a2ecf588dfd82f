// Another process of this machine, as the kernel tells of its end.
#pragma once

#include <cstdint>

#include "os/fd.h"

namespace pycomm {

// A process that this one can see by its number. The descriptor is of whatever process has the
// number now: of the one that is meant, or, where the number was given out again, of another, while
// the one that is meant has ended.
class Process {
 public:
  Process() = default;
  // Nothing is known of it, as of a default one, where `pid` is 0 or the system has no pidfds (a
  // kernel before 5.3, a sandbox that forbids them).
  explicit Process(int64_t pid);

  // To be polled for POLLIN, which comes when the process has ended; empty: there is nothing to
  // wait for.
  const Fd& descriptor() const { return fd_; }
  bool ended() const { return ended_; }
  // Asks the kernel, unless it is known.
  bool look();
  void found_ended() {
    ended_ = true;
    fd_.reset();
  }

 private:
  Fd fd_;
  bool ended_ = false;
};

// When a process began, in clock ticks since the machine did: field 22 of /proc/PID/stat. 0: it
// cannot be seen. A process id that was given out again has another.
int64_t start_time(int64_t pid);

}  // namespace pycomm
