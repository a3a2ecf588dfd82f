// The registry of open descriptors, one bit each. Code in a forked child must not lock or allocate,
// because another thread of the parent may have held the lock.
#include "os/fd.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>

namespace pycomm::os {
namespace {

// Linux's default limit of descriptors; one beyond it stays open in children.
constexpr size_t kMostDescriptors = size_t{1} << 20;
constexpr size_t kBits = 64;

std::array<std::atomic<uint64_t>, kMostDescriptors / kBits> registered{};
std::atomic<size_t> words_used{0};

// If so many descriptors are left, their exact number does not matter.
constexpr size_t kPlenty = 256;

uint64_t bit(int fd) { return uint64_t{1} << (static_cast<size_t>(fd) % kBits); }

// Async-signal-safe. Only the thread that forked exists.
void close_in_child() {
  fork_state::count.fetch_add(1, std::memory_order_relaxed);
  const size_t used = words_used.load(std::memory_order_relaxed);
  for (size_t word = 0; word < used; ++word)
    for (uint64_t bits = registered[word].exchange(0, std::memory_order_relaxed); bits != 0;
         bits &= bits - 1)
      ::close(static_cast<int>(word * kBits + static_cast<size_t>(std::countr_zero(bits))));
}

[[maybe_unused]] const int handler = pthread_atfork(nullptr, nullptr, &close_in_child);

}  // namespace

void Fd::add_to_registry() const {
  const size_t word = static_cast<size_t>(fd_) / kBits;
  if (word >= registered.size()) return;
  registered[word].fetch_or(bit(fd_), std::memory_order_relaxed);
  size_t used = words_used.load(std::memory_order_relaxed);
  while (used <= word &&
         !words_used.compare_exchange_weak(used, word + 1, std::memory_order_relaxed)) {
  }
}

// Clears the bit first: another thread may get the number as soon as it is closed.
void Fd::close() const {
  const size_t word = static_cast<size_t>(fd_) / kBits;
  if (word < registered.size()) registered[word].fetch_and(~bit(fd_), std::memory_order_relaxed);
  ::close(fd_);
}

DescriptorLimit descriptor_limit() {
  constexpr size_t kUnknown = std::numeric_limits<size_t>::max();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {kUnknown, kUnknown};
  const auto most = static_cast<size_t>(limit.rlim_cur);
  // Since Linux 6.2 the size of the directory is the number of descriptors; before, it is 0.
  struct stat directory{};
  if (::stat("/proc/self/fd", &directory) == 0 && directory.st_size > 0) {
    const auto numbers = static_cast<size_t>(directory.st_size);
    if (numbers + kPlenty <= most) return {most, most - numbers};
  }
  // Numbers above the limit are from before it was lowered, and do not count.
  std::error_code error;
  size_t open = 0;
  std::filesystem::directory_iterator at("/proc/self/fd", error);
  if (error == std::errc::too_many_files_open) return {most, 0};
  if (error) return {kUnknown, kUnknown};
  for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename();
    size_t number = 0;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (number < most) ++open;
  }
  return {most, most - std::min(open, most)};
}

}  // namespace pycomm::os
