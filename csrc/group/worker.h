// Whose turn it is: one caller at a time, and behind it the asynchronous calls, in order, on one
// thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/deadline.h"
#include "group/group.h"

namespace pycomm {

class Worker {
 public:
  using Body = std::function<void()>;
  using Then = std::function<void(std::exception_ptr)>;

  // `interrupted` is asked while a caller waits for its turn or for a work.
  explicit Worker(std::function<bool()> interrupted) : interrupted_(std::move(interrupted)) {}
  ~Worker();

  using Limit = std::function<std::chrono::nanoseconds()>;
  // Takes the time since which the call waits for its turn, or {} where it did not wait.
  using Timed = std::function<void(Clock::time_point since)>;
  // Runs `body` on this thread when everything started before is over. InvalidArgument if another
  // thread is inside; Timeout, and `body` does not run, if its turn does not come within `limit`,
  // which is asked for only where there is something to wait for. Inside a `then`, whose turn it
  // is, `body` runs at once.
  void run(const Timed& body, const Limit& limit);
  // Inside a `then` this too runs `body` at once: who waits there for the work must not wait for
  // the thread that he is on, and the order of calls is that of a `then` which came too late for
  // the worker and runs on the thread that adds it.
  std::shared_ptr<Work> start(Body body, Then then);
  // Runs `body` between two calls, when all that was started and who is inside is over; not at all
  // on a thread that is inside a call itself.
  void run_exclusive(const Body& body);
  // True if a call runs or waits.
  bool busy() const;
  // Lets nobody in any more, and ends the thread when what was started and who is inside is over.
  // Whoever joins inside a `then` may destroy the worker there.
  void join();

 private:
  class Started;
  // What the thread uses. It may outlive the worker by the end of the `then` that destroyed it.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Started>> queue;
    bool caller_inside = false, worker_inside = false, ending = false;
    std::thread::id caller, thread;
  };
  Clock::time_point enter(std::unique_lock<std::mutex>& lock, const Limit& limit);
  static void loop(State& state);
  static void run_next(State& state, std::unique_lock<std::mutex>& lock);

  std::function<bool()> interrupted_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace pycomm
