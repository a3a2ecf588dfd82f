// Starts a thread of the library. All threads that pycomm makes are started here, so that each has
// a name, leaves signals to the program's own threads, and fails with an Error of ours.
#pragma once

#include <pthread.h>

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"

namespace pycomm {

// While it lives this thread, and every thread that it starts, takes no signal but those of its own
// faults: a signal taken elsewhere would not wake the thread of the program that waits.
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

// `name` has at most 15 bytes. Throws Unsupported, and `function` does not run, where the system
// gives no thread: call it before anything refers to what the thread is to do.
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
                      "pids.max of its cgroup): raise it, or let the program use fewer threads");
  }
}

}  // namespace pycomm
