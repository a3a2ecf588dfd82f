#include "os/shared_heap.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "os/shared_memory.h"
#include "os/socket.h"

namespace pycomm::os {
namespace {

// With 64 ranks a process maps 64 TiB, half of the address space.
constexpr size_t kMostBytes = size_t{1} << 40;

bool is_limited(int resource) {
  rlimit limit{};
  return ::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 ||
         limit.rlim_cur != RLIM_INFINITY;
}

HeapView map(int fd, size_t bytes) {
  HeapView view{map_shared_memory(fd, bytes), bytes};
  // Excludes it from core dumps, which would contain all of it.
  (void)::madvise(view.base.get(), bytes, MADV_DONTDUMP);
  return view;
}

}  // namespace

size_t SharedHeap::capacity() {
  if (is_limited(RLIMIT_AS) || is_limited(RLIMIT_FSIZE)) return 0;
  const auto pages = static_cast<size_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
  return std::min(kMostBytes, pages * page_bytes());
}

std::shared_ptr<SharedHeap> SharedHeap::own() {
  static std::mutex mutex;
  static std::weak_ptr<SharedHeap> known;
  const std::lock_guard lock(mutex);
  auto heap = known.lock();
  if (heap && heap->owner_ == ::getpid()) return heap;
  if (capacity() == 0) return nullptr;
  try {
    heap = std::make_shared<SharedHeap>();
  } catch (const Error&) {
    return nullptr;  // no memfd here
  }
  known = heap;
  return heap;
}

SharedHeap::SharedHeap()
    : fd_(make_shared_memory(capacity())),
      view_(map(fd_.get(), capacity())),
      owner_(::getpid()),
      free_{{0, view_.bytes}} {}

std::shared_ptr<std::byte> SharedHeap::allocate(size_t bytes) {
  const size_t page = page_bytes(), most = view_.bytes;
  const size_t whole =
      bytes > most ? most + 1 : (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(free_, [&](const auto& hole) { return hole.second >= whole; });
  if (found == free_.end())
    throw InvalidArgument(
        "cannot allocate " + std::to_string(bytes) +
        " bytes of shared memory: no free range of the heap is large enough; it has " +
        std::to_string(most) + " bytes, the machine's memory");
  const auto [begin, length] = *found;
  free_.erase(found);
  if (length > whole) free_.emplace(begin + whole, length - whole);
  taken_.emplace(begin, whole);
  return {view_.base.get() + begin,
          [heap = shared_from_this(), begin](std::byte*) { heap->release(begin); }};
}

void SharedHeap::release(size_t begin) noexcept {
  if (owner_ != ::getpid()) return;  // a forked child: the pages belong to the parent
  const std::lock_guard lock(mutex_);
  auto hole = taken_.extract(begin);  // moves to the other map, which allocates nothing
  size_t& bytes = hole.mapped();
  // Returns the pages to the system; if that fails, the next allocation reuses them.
  (void)::madvise(view_.base.get() + begin, bytes, MADV_REMOVE);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_.insert(std::move(hole));
}

HeapView map_heap(int fd, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<std::byte>> known;
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_errno("looking at a peer's heap");
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<std::byte>& found = known[{status.st_dev, status.st_ino}];
  HeapView view{found.lock(), bytes};
  if (!view.base) found = (view = map(fd, bytes)).base;
  return view;
}

}  // namespace pycomm::os
