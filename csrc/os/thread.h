// Starts all threads of pycomm, so that each has a name, blocks signals, which the program's own
// threads handle, and fails with a pycomm Error.
#pragma once

#include <pthread.h>

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace pycomm::os {

// Blocks all signals except those of its own faults for this thread, and for every thread that it
// starts, during its lifetime. A signal handled in a library thread would not wake the program's
// waiting thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS})
      sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

// `name` has at most 15 bytes. Throws Unsupported, without running `function`, if the system cannot
// create a thread: call it before other state depends on the thread.
template <typename Function>
std::thread start_thread(const char* name, Function function) {
  const SignalsBlocked blocked;  // the new thread inherits the mask
  try {
    return std::thread([name, function = std::move(function)]() mutable {
      ::pthread_setname_np(::pthread_self(), name);
      function();
    });
  } catch (const std::system_error& error) {
    throw Unsupported("the thread " + std::string(name) + " cannot be created: " + error.what() +
                      "; the limit of threads of this user or container is reached (ulimit -u, "
                      "pids.max of its cgroup): raise it, or use fewer threads");
  }
}

}  // namespace pycomm::os
