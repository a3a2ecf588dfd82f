// Memory of a process that the other ranks of its host map whole, so that they can reduce its
// arrays where they lie. Not a general allocator: pages at a time, for arrays of many.
//
// A heap is one memfd, as large as the machine's memory and sparse: it costs what is allocated in
// it. Whoever has mapped it keeps the mapping as long as it needs it, so nothing that another
// process allocates, frees, or leaves behind by dying can make it fault; what was freed reads as
// zeroes. It has no name, so nothing is left behind. After a fork the child's arrays stay the
// parent's memory, and what the child allocates lies in a heap of its own.
//
// Called by the transport that passes its descriptor on, and by the group.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "os/fd.h"

namespace pycomm {

// A heap as it is mapped here.
struct HeapView {
  std::shared_ptr<std::byte> base;  // null: there is none
  size_t bytes = 0;

  // Where these bytes of this process lie in the heap, if they do.
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
  // This process's: made when first asked for, gone when nobody holds it. Null where address space
  // or the size of files is limited, or there are no memfds.
  static std::shared_ptr<SharedHeap> own();
  // What own() would have, the same for all processes of a machine that have one; 0: none.
  static size_t capacity();

  SharedHeap();
  // Whole pages, at least one; they hold the heap. Throws InvalidArgument where there is not that
  // much left.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  int descriptor() const { return fd_.get(); }
  const HeapView& view() const { return view_; }

 private:
  void release(size_t begin) noexcept;

  Fd fd_;
  HeapView view_;
  pid_t owner_;
  std::mutex mutex_;               // guards the rest
  std::map<size_t, size_t> free_;  // begin to bytes, none beside another
  std::map<size_t, size_t> taken_;
};

// The heap of `bytes` behind a peer's descriptor, mapped once however often it is asked for.
HeapView map_heap(int fd, size_t bytes);

}  // namespace pycomm
