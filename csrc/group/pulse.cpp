#include "group/pulse.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace pycomm {
namespace {

// Signals are for the program's own threads: taken here they would not wake the one that waits.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;
  ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

void Pulse::start(std::chrono::nanoseconds interval, std::function<bool()> beat) {
  const SignalsHeld held;  // the new thread has the mask of the one that makes it
  const std::lock_guard lock(mutex_);
  thread_ = std::thread([this, interval, beat = std::move(beat)] {
    ::pthread_setname_np(::pthread_self(), "pycomm-pulse");
    std::unique_lock waiting(mutex_);
    while (!changed_.wait_for(waiting, interval, [&] { return ending_; })) {
      waiting.unlock();
      const bool more = beat();
      waiting.lock();
      if (!more) return;
    }
  });
}

void Pulse::join() noexcept {
  std::thread ended;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    ended = std::move(thread_);
  }
  changed_.notify_all();
  if (ended.joinable()) ended.join();
}

}  // namespace pycomm
