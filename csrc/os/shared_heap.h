// The shared heap of a process: the other ranks of its host map all of it, so that they can reduce
// its arrays in place (zero-copy). It allocates whole pages, for large arrays.
//
// A heap is one sparse memfd of the size of the machine's memory: it uses only the memory that is
// allocated in it. A peer keeps its mapping as long as it needs it. So nothing that another process
// allocates or frees, nor its death, can cause a fault; freed memory reads as zeros. The memfd has
// no name, so nothing remains after the processes end. After a fork the child's arrays remain the
// parent's memory, and the child allocates in a heap of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "os/fd.h"

namespace pycomm::os {

// A heap as mapped by this process.
struct HeapView {
  std::shared_ptr<std::byte> base;  // null: no heap
  size_t bytes = 0;

  // The offset of these bytes in the heap, if they are in it.
  std::optional<uint64_t> offset_of(const void* at, size_t size) const {
    const auto begin = reinterpret_cast<uintptr_t>(base.get());
    const auto address = reinterpret_cast<uintptr_t>(at);
    if (!base || address < begin || !holds(address - begin, size)) return std::nullopt;
    return address - begin;
  }
  bool holds(uint64_t offset, size_t size) const {
    return offset <= bytes && size <= bytes - offset;
  }
};

class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  // The heap of this process: created at the first call, destroyed with its last reference. Null if
  // address space or file size is limited, or there are no memfds.
  static std::shared_ptr<SharedHeap> own();
  // The size of own(), equal for all processes of a machine that have a heap; 0: no heap.
  static size_t capacity();

  SharedHeap();
  // Whole pages, at least one; they keep the heap alive. Throws InvalidArgument if the heap has not
  // enough free space.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  int descriptor() const { return fd_.get(); }
  const HeapView& view() const { return view_; }

 private:
  void release(size_t begin) noexcept;

  Fd fd_;
  HeapView view_;
  pid_t owner_;
  std::mutex mutex_;               // guards the rest
  std::map<size_t, size_t> free_;  // begin to bytes; adjacent ranges are merged
  std::map<size_t, size_t> taken_;
};

// A peer's heap of `bytes`, by its descriptor; mapped only once, also after repeated calls.
HeapView map_heap(int fd, size_t bytes);

}  // namespace pycomm::os
