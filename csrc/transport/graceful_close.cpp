// See graceful_close.h.
#include "transport/graceful_close.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "os/thread.h"

namespace pycomm::transport {
namespace {

constexpr std::chrono::seconds kLimit{2};
// There is no event for an acknowledgement, so it is polled.
constexpr int kPollMs = 5;
// Consecutive reads of one socket, so that a peer that never stops delays no other.
constexpr int kReads = 16;

struct ClosingSocket {
  os::Fd socket;
  std::vector<std::byte> unsent{};
  size_t sent = 0;  // bytes of it
  Deadline deadline{kLimit};
  bool read_shut_down = false;  // the peer shut down its sending side
  bool has_unsent() const { return sent < unsent.size(); }
};

// Sends the unsent bytes that fit now. False: the peer closed the connection.
bool send_unsent(ClosingSocket& closing) {
  while (closing.has_unsent()) {
    const auto rest = std::span(closing.unsent).subspan(closing.sent);
    const auto n =
        ::send(closing.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    closing.sent += static_cast<size_t>(n);
    if (!closing.has_unsent()) ::shutdown(closing.socket.get(), SHUT_WR);
  }
  return true;
}

// Whether the socket can be closed. Drops the bytes that have arrived.
bool is_finished(ClosingSocket& closing) {
  if (!send_unsent(closing)) return true;
  std::array<std::byte, 16 << 10> dropped{};
  for (int i = 0; i < kReads; ++i) {
    const auto n = ::recv(closing.socket.get(), dropped.data(), dropped.size(), MSG_DONTWAIT);
    closing.read_shut_down |= n == 0;
    if (n < 0 && errno != EAGAIN && errno != EINTR) return true;
    if (n <= 0) break;
  }
  if (closing.has_unsent()) return closing.deadline.expired();
  if (closing.read_shut_down) return true;
  int unacknowledged = 0;
  const bool known = ::ioctl(closing.socket.get(), SIOCOUTQ, &unacknowledged) == 0;
  // The FIN counts as one byte.
  return !known || unacknowledged <= 1 || closing.deadline.expired();
}

class GracefulCloser {
 public:
  void add(ClosingSocket one) {
    const std::lock_guard lock(mutex_);
    if (!running_) {  // first: if it throws, the socket is closed and does not leak
      os::start_thread("pycomm-closing", [this] { run(); }).detach();
      running_ = true;
    }
    closing_.push_back(std::move(one));
  }

  // A forked child does not have the thread.
  void wait() {
    if (::getpid() != owner_) return;
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return !running_; });
  }

 private:
  void run() {
    std::vector<ClosingSocket> closing;
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        for (ClosingSocket& one : closing_) closing.push_back(std::move(one));
        closing_.clear();
        if (closing.empty()) {
          running_ = false;
          finished_.notify_all();
          return;
        }
      }
      std::vector<pollfd> polled;
      for (const ClosingSocket& one : closing) {
        const int events = (one.read_shut_down ? 0 : POLLIN) | (one.has_unsent() ? POLLOUT : 0);
        polled.push_back({one.socket.get(), static_cast<short>(events), 0});
      }
      ::poll(polled.data(), polled.size(), kPollMs);
      std::erase_if(closing, is_finished);
    }
  }

  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable finished_;
  std::vector<ClosingSocket> closing_;  // not yet taken over by the thread
  bool running_ = false;
};

// Never destroyed: the thread may still run when static objects are destroyed.
GracefulCloser& graceful_closer() {
  static auto* const one = new GracefulCloser;
  static const struct AtTheEnd {
    ~AtTheEnd() { one->wait(); }
  } at_the_end;
  return *one;
}

}  // namespace

void close_gracefully(os::Fd socket, ConstBytes unsent) {
  if (!socket) return;
  if (unsent.empty()) ::shutdown(socket.get(), SHUT_WR);
  try {
    ClosingSocket closing{std::move(socket), {unsent.begin(), unsent.end()}};
    if (is_finished(closing)) return;
    graceful_closer().add(std::move(closing));
  } catch (...) {  // out of memory or threads: the unsent bytes are lost
  }
}

}  // namespace pycomm::transport
