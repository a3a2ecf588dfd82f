// See linger.h.
#include "transport/linger.h"

#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/deadline.h"

namespace pycomm {
namespace {

constexpr std::chrono::seconds kLimit{2};
// Nothing tells of an acknowledgement: one looks.
constexpr int kLookMs = 5;
// Reads in a row of one socket, so that a peer that never stops holds nobody up.
constexpr int kReads = 16;

struct Leaving {
  Fd socket;
  Deadline deadline{kLimit};
};

// Whether nothing is left to wait for. Drops what has arrived.
bool has_left(const Leaving& leaving) {
  std::array<std::byte, 16 << 10> dropped{};
  for (int i = 0; i < kReads; ++i) {
    const auto n = ::recv(leaving.socket.get(), dropped.data(), dropped.size(), MSG_DONTWAIT);
    if (n == 0) return true;
    if (n < 0 && errno != EAGAIN && errno != EINTR) return true;
    if (n < 0) break;
  }
  int unacknowledged = 0;
  const bool known = ::ioctl(leaving.socket.get(), SIOCOUTQ, &unacknowledged) == 0;
  // The end of the stream counts as one.
  return !known || unacknowledged <= 1 || leaving.deadline.expired();
}

class Linger {
 public:
  void add(Leaving one) {
    const std::lock_guard lock(mutex_);
    leaving_.push_back(std::move(one));
    if (running_) return;
    std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "pycomm-linger");
      run();
    }).detach();
    running_ = true;
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
      for (const Leaving& one : leaving) polled.push_back({one.socket.get(), POLLIN, 0});
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

void see_off(Fd socket) {
  if (!socket) return;
  ::shutdown(socket.get(), SHUT_WR);
  Leaving leaving{std::move(socket)};
  if (has_left(leaving)) return;
  try {
    linger().add(std::move(leaving));
  } catch (...) {  // out of memory or threads: what is lost then is lost
  }
}

}  // namespace pycomm
