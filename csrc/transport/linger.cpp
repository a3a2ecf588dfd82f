// See linger.h.
#include "transport/linger.h"

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

namespace pycomm {
namespace {

constexpr std::chrono::seconds kLimit{2};
// Nothing tells of an acknowledgement: one looks.
constexpr int kLookMs = 5;
// Reads in a row of one socket, so that a peer that never stops holds nobody up.
constexpr int kReads = 16;

struct Leaving {
  Fd socket;
  std::vector<std::byte> owed{};
  size_t told = 0;  // bytes of it that are out
  Deadline deadline{kLimit};
  bool deaf = false;  // the peer has shut its sending side
  bool speaks() const { return told < owed.size(); }
};

// Sends what is owed, as it fits. False: there is nobody to send to.
bool speak(Leaving& leaving) {
  while (leaving.speaks()) {
    const auto rest = std::span(leaving.owed).subspan(leaving.told);
    const auto n =
        ::send(leaving.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    leaving.told += static_cast<size_t>(n);
    if (!leaving.speaks()) ::shutdown(leaving.socket.get(), SHUT_WR);
  }
  return true;
}

// Whether nothing is left to wait for. Drops what has arrived.
bool has_left(Leaving& leaving) {
  if (!speak(leaving)) return true;
  std::array<std::byte, 16 << 10> dropped{};
  for (int i = 0; i < kReads; ++i) {
    const auto n = ::recv(leaving.socket.get(), dropped.data(), dropped.size(), MSG_DONTWAIT);
    leaving.deaf |= n == 0;
    if (n < 0 && errno != EAGAIN && errno != EINTR) return true;
    if (n <= 0) break;
  }
  if (leaving.speaks()) return leaving.deadline.expired();
  if (leaving.deaf) return true;
  int unacknowledged = 0;
  const bool known = ::ioctl(leaving.socket.get(), SIOCOUTQ, &unacknowledged) == 0;
  // The end of the stream counts as one.
  return !known || unacknowledged <= 1 || leaving.deadline.expired();
}

class Linger {
 public:
  void add(Leaving one) {
    const std::lock_guard lock(mutex_);
    if (!running_) {  // first: without a thread the socket is closed, and not kept for ever
      start_thread("pycomm-linger", [this] { run(); }).detach();
      running_ = true;
    }
    leaving_.push_back(std::move(one));
  }

  // A forked child has neither the thread nor any part in it.
  void wait() {
    if (::getpid() != owner_) return;
    std::unique_lock lock(mutex_);
    gone_.wait(lock, [this] { return !running_; });
  }

 private:
  void run() {
    std::vector<Leaving> leaving;
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        for (Leaving& one : leaving_) leaving.push_back(std::move(one));
        leaving_.clear();
        if (leaving.empty()) {
          running_ = false;
          gone_.notify_all();
          return;
        }
      }
      std::vector<pollfd> polled;
      for (const Leaving& one : leaving) {
        const int events = (one.deaf ? 0 : POLLIN) | (one.speaks() ? POLLOUT : 0);
        polled.push_back({one.socket.get(), static_cast<short>(events), 0});
      }
      ::poll(polled.data(), polled.size(), kLookMs);
      std::erase_if(leaving, has_left);
    }
  }

  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable gone_;
  std::vector<Leaving> leaving_;  // that the thread has not taken over yet
  bool running_ = false;
};

// Never destroyed: the thread may outlive whatever ends first.
Linger& linger() {
  static auto* const one = new Linger;
  static const struct AtTheEnd {
    ~AtTheEnd() { one->wait(); }
  } at_the_end;
  return *one;
}

}  // namespace

void see_off(Fd socket, ConstBytes owed) {
  if (!socket) return;
  if (owed.empty()) ::shutdown(socket.get(), SHUT_WR);
  try {
    Leaving leaving{std::move(socket), {owed.begin(), owed.end()}};
    if (has_left(leaving)) return;
    linger().add(std::move(leaving));
  } catch (...) {  // out of memory or threads: what is lost then is lost
  }
}

}  // namespace pycomm
