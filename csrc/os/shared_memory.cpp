#include "os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "os/socket.h"

namespace pycomm::os {

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Fd make_shared_memory(size_t bytes, const char* name) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("making shared memory");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("sizing shared memory");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("sealing shared memory");
  return fd;
}

bool is_shared_memory(int fd, size_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  struct stat status{};
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &status) == 0 &&
         static_cast<size_t>(status.st_size) == bytes;
}

std::shared_ptr<std::byte> map_shared_memory(int fd, size_t bytes, size_t first) {
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(first));
  if (base == MAP_FAILED) throw_errno("mapping shared memory");
  return {static_cast<std::byte*>(base), [bytes](std::byte* at) { ::munmap(at, bytes); }};
}

RingMemory::RingMemory(int fd, size_t bytes) : bytes_(bytes) {
  const size_t page = page_bytes();
  void* base = ::mmap(nullptr, page + 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw_errno("reserving shared memory");
  base_ = static_cast<std::byte*>(base);
  const int access = PROT_READ | PROT_WRITE, where = MAP_SHARED | MAP_FIXED;
  if (::mmap(base_, page + bytes, access, where, fd, 0) == MAP_FAILED ||
      ::mmap(base_ + page + bytes, bytes, access, where, fd, static_cast<off_t>(page)) ==
          MAP_FAILED) {
    ::munmap(base_, page + 2 * bytes);
    throw_errno("mapping shared memory");
  }
}

RingMemory::~RingMemory() { ::munmap(base_, page_bytes() + 2 * bytes_); }

}  // namespace pycomm::os
