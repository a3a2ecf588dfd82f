// Shared memory of two ranks without a name, so that nothing remains after both ended.
#pragma once

#include <cstddef>
#include <memory>

#include "os/fd.h"

namespace pycomm::os {

// A memfd of `bytes`, sealed against shrinking, so that a peer cannot cause a fault here. /proc
// shows it as `name`.
Fd make_shared_memory(size_t bytes, const char* name = "pycomm");

// True if `fd` is such memory of exactly `bytes`.
bool is_shared_memory(int fd, size_t bytes);

// Maps `bytes` of `fd` from `first` on, a multiple of the page size; readable and writable until
// the last reference is destroyed.
std::shared_ptr<std::byte> map_shared_memory(int fd, size_t bytes, size_t first = 0);

size_t page_bytes();

// A head of one page and a ring of `bytes` (a multiple of the page size), which is mapped twice in
// a row, so that any range of up to `bytes` in it is contiguous.
class RingMemory {
 public:
  RingMemory(int fd, size_t bytes);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  static size_t file_bytes(size_t ring_bytes) { return page_bytes() + ring_bytes; }
  std::byte* head() const { return base_; }
  std::byte* ring() const { return base_ + page_bytes(); }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  size_t bytes_;
};

}  // namespace pycomm::os
