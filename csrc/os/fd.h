// An owned file descriptor that a forked child does not keep open.
//
// A child with a rank's sockets would hide the rank's death from its peers, because the kernel
// closes a connection only when the last process that has it ends. So every descriptor here is
// registered, and a forked child closes those of its parent first (pthread_atfork). In the child,
// get() of the parent's objects returns -1, and they do not close a new descriptor with the same
// number.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

namespace pycomm::os {

namespace fork_state {
inline std::atomic<unsigned> count{0};
}

// The number of forks between this process and the one that loaded the library. An object that was
// created with a different number belongs to the parent.
inline unsigned forks() { return fork_state::count.load(std::memory_order_relaxed); }

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {
    if (fd_ >= 0) add_to_registry();
  }
  Fd(Fd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), forks_at_creation_(other.forks_at_creation_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(forks_at_creation_, other.forks_at_creation_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (get() >= 0) close();
  }

  int get() const { return forks_at_creation_ == forks() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }
  void reset() { Fd old(std::move(*this)); }

 private:
  void add_to_registry() const;
  void close() const;

  int fd_ = -1;
  unsigned forks_at_creation_ = forks();
};

// How many descriptors this process may have, and how many of them are at least not open. Both are
// the largest number if the system does not tell.
struct DescriptorLimit {
  size_t most, left;
};
DescriptorLimit descriptor_limit();

}  // namespace pycomm::os
