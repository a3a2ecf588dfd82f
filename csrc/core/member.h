// Identity of a rank of a group.
#pragma once

#include <cstdint>
#include <string>

namespace pycomm {

// The identity of a rank, as published while the group formed.
struct Member {
  std::string host;
  int64_t pid = 0;
  std::string transport;  // from this rank to it: "self", "local", "shm", "tcp"
  bool visible = false;   // its process id is valid on this rank
  // Start time of its process in clock ticks since boot (field 22 of /proc/PID/stat). With the
  // process id it identifies a process uniquely. 0: unknown.
  int64_t started = 0;
};

}  // namespace pycomm
