// A file descriptor that closes itself, and that no forked child keeps open.
//
// A child that held a rank's sockets would hide the rank's death from its peers: the kernel closes
// a connection when the last process that holds it ends. So every descriptor here is registered,
// and a child closes those of its parent as the first thing it does (pthread_atfork). In the child
// the objects that held them are empty: get() gives -1, and what the child opens under the same
// number is left alone.
#pragma once

#include <atomic>
#include <utility>

namespace pycomm {

namespace fork_state {
inline std::atomic<unsigned> count{0};
}

// How many forks lie between this process and the one that loaded the library: an object that was
// made under another number is the parent's.
inline unsigned forks() { return fork_state::count.load(std::memory_order_relaxed); }

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {
    if (fd_ >= 0) enter();
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), born_(other.born_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(born_, other.born_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (get() >= 0) close();
  }

  int get() const { return born_ == forks() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }
  void reset() { Fd old(std::move(*this)); }

 private:
  void enter() const;
  void close() const;

  int fd_ = -1;
  unsigned born_ = forks();
};

}  // namespace pycomm
