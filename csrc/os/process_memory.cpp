#include "os/process_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <array>

namespace pycomm::os {
namespace {

void* address_of(uint64_t at) { return reinterpret_cast<void*>(static_cast<uintptr_t>(at)); }

}  // namespace

// A read may be partial, at the end of a mapping or after a signal.
bool read_process(pid_t process, uint64_t from, std::byte* into, size_t bytes) {
  while (bytes > 0) {
    const iovec to{into, bytes}, at{address_of(from), bytes};
    const ssize_t copied = process_vm_readv(process, &to, 1, &at, 1, 0);
    if (copied <= 0) return false;
    from += static_cast<uint64_t>(copied);
    into += copied;
    bytes -= static_cast<size_t>(copied);
  }
  return true;
}

bool is_readable(const std::byte* at, size_t bytes) {
  if (bytes == 0) return true;
  std::array<std::byte, 2> found{};
  const auto begin = reinterpret_cast<uintptr_t>(at);
  const iovec into{found.data(), found.size()};
  const std::array<iovec, 2> ends{{{address_of(begin), 1}, {address_of(begin + bytes - 1), 1}}};
  return process_vm_readv(getpid(), &into, 1, ends.data(), ends.size(), 0) == 2;
}

}  // namespace pycomm::os
