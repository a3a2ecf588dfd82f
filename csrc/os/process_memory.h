// Reads the memory of another process of this host (cross-memory attach). The kernel allows it for
// processes of one user that may be debugged, unless a security module (Yama) forbids it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pycomm::os {

// Copies `bytes` from address `from` of a process. False if the process or the memory does not
// exist (any more) or must not be read; then `into` is undefined.
bool read_process(pid_t process, uint64_t from, std::byte* into, size_t bytes);

// Whether the first and last byte of memory of this process can be read so. Device memory cannot.
bool is_readable(const std::byte* at, size_t bytes);

}  // namespace pycomm::os
