// Reading the memory of another process of this host, where the kernel allows it: for processes of
// one user that may be debugged, without security modules that forbid it (Yama).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pycomm {

// Copies `bytes` from address `from` of a process. False where the process or the memory is not
// there (any more), or may not be read; then `into` is undefined.
bool read_process(pid_t process, uint64_t from, std::byte* into, size_t bytes);

// Whether the ends of this memory of ours can be read in that way: that of a device cannot.
bool is_readable(const std::byte* at, size_t bytes);

}  // namespace pycomm
