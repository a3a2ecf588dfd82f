// Detects the end of another process on this machine.
#pragma once

#include <cstdint>
#include <memory>

#include "os/fd.h"

namespace pycomm::os {

// A process with a given id. If the id was reused, the descriptor refers to the new process, and
// the intended one has ended; start_time() tells them apart.
class Process {
 public:
  Process() = default;
  // Observes nothing, like a default one, if `pid` is 0 or the system has no pidfds (a kernel
  // before 5.3, or a sandbox that forbids them).
  explicit Process(int64_t pid);

  // Becomes readable (POLLIN) when the process ends; -1: there is nothing to wait for. All objects
  // for one process share it.
  int descriptor() const { return fd_ ? fd_->get() : -1; }
  bool ended() const { return ended_; }
  // Updates and returns ended().
  bool look();
  void found_ended() {
    ended_ = true;
    fd_.reset();
  }

 private:
  std::shared_ptr<const Fd> fd_;
  bool ended_ = false;
};

// The start time of a process in clock ticks since boot: field 22 of /proc/PID/stat. 0: not
// visible. It differs after a process id was reused.
int64_t start_time(int64_t pid);

}  // namespace pycomm::os
