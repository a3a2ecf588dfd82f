// Orders the calls of a group: one caller at a time, and asynchronous calls in order on one thread.
// A caller that waits for its turn is queued like an asynchronous call, so turns are first come,
// first served. Asynchronous receives wait there only while no other call runs or waits for its
// turn. A receive with nothing else under way can be left to the thread that waits for it, which
// saves two context switches.
//
// The states of a worker, and the functions that change them:
//
//   from         by                                 to
//   idle         take_turn()                        calling: a caller is inside
//   calling      ~Turn()                            idle, queued
//   idle         start(), start_receive()           queued: the queue or the receives grow
//   idle         run_at_once()                      calling, as `at_once`: other threads may start
//   idle         start_receive(), deferrable        deferred
//   deferred     start_receive(), end_deferral()    queued
//   deferred     Work::wait(), Work::advance()      receiving, on the caller's thread
//   queued       take_turn()                        queued: the caller waits in the queue
//   queued       the caller is first in the queue   calling
//   queued       loop(), a call is first            working; with an empty queue, receiving
//   working      the body returns                   idle, queued
//   receiving    a message arrived                  idle, queued
//   receiving    suspend_receives()                 queued: a call goes first
//   any          join()                             ending: completes all, starts nothing
//
// A receive can stay deferred in all other states.
// run_exclusive() changes no state: it waits until no call runs, and keeps the mutex while it runs.
//
// Invariants, under the mutex; State::settle() asserts or establishes 2 to 6:
//
//  1. At most one thread uses the engine: the caller inside; the worker or its substitute
//     (worker_inside); or one in run_exclusive().
//  2. If a thread is receiving, it is the worker inside, and there are receives.
//  3. A deferred receive was started before all others, so there are no `receives`.
//  4. While the worker is ending, no receive is deferred.
//  5. receives_pending: whether a receive is deferred or in `receives`.
//  6. The fast path of Caller is enabled only if the worker is idle and no thread waits for that.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "group/group.h"

namespace pycomm::group {

// The thread inside a call. While nothing else is under way, calls enter and leave without a lock.
class Caller {
 public:
  bool try_enter() {
    uintptr_t free = 0;
    return word_.compare_exchange_strong(free, me(), std::memory_order_acquire);
  }
  bool try_leave() {
    uintptr_t mine = me();
    return word_.compare_exchange_strong(mine, 0, std::memory_order_release);
  }
  // A call that is started, and runs at once: no thread is inside, and calls wait until leave().
  bool try_enter_at_once() {
    uintptr_t free = 0;
    return word_.compare_exchange_strong(free, kAtOnce, std::memory_order_acquire);
  }
  bool try_leave_at_once() {
    uintptr_t mine = kAtOnce;
    return word_.compare_exchange_strong(mine, 0, std::memory_order_release);
  }

  // All others require the worker's mutex. While the fast path is disabled, try_enter() and
  // try_leave() fail, so that the thread inside does not change without the mutex.
  void disable_fast_path() { word_.fetch_or(kFastPathDisabled); }
  void enable_fast_path() { word_.fetch_and(~kFastPathDisabled); }
  bool is_inside() const { return (word_.load() & ~kFastPathDisabled) != 0; }
  bool is_this_thread() const { return thread() == me(); }
  // pthread_self() of the thread inside, as Python's threading.get_ident(); 0: none.
  uintptr_t thread() const { return word_.load() & ~(kFastPathDisabled | kAtOnce); }
  void enter() { word_.fetch_or(me()); }
  void leave() { word_.fetch_and(kFastPathDisabled); }

 private:
  // Addresses of threads are multiples of 4.
  static constexpr uintptr_t kFastPathDisabled = 1, kAtOnce = 2;
  static uintptr_t me() { return static_cast<uintptr_t>(::pthread_self()); }

  std::atomic<uintptr_t> word_{0};
};

// An asynchronous receive.
struct PendingReceive {
  Call call;
  Deadline deadline;
};

class Worker {
  struct State;

 public:
  struct Completed {
    size_t index;
    std::exception_ptr error;
  };
  // How the worker waits for messages.
  struct Receiver {
    // Waits until one of the receives is complete. Empty if suspend() ended the wait.
    std::function<std::optional<Completed>(std::span<const PendingReceive* const>)> wait;
    std::function<void()> suspend;  // from any thread: ends wait(), until resume()
    std::function<void()> resume;
  };
  // The turn of a call on its caller's thread; it ends with the object.
  class Turn {
   public:
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn();
    // When the call began to wait for its turn.
    Clock::time_point since() const { return since_; }

   private:
    friend class Worker;
    Turn(State* state, Clock::time_point since) : state_(state), since_(since) {}
    State* state_;  // null inside a `then`
    Clock::time_point since_;
  };
  using Body = std::function<void()>;
  using Then = std::function<void(std::exception_ptr)>;

  // `interrupted` is polled while a caller waits for its turn or for a Work. `thread_multiple`: a
  // second thread waits for its turn; otherwise its calls throw InvalidArgument.
  Worker(std::function<bool()> interrupted, Receiver receiver, bool thread_multiple)
      : interrupted_(std::move(interrupted)),
        state_(std::make_shared<State>(std::move(receiver), thread_multiple)) {}
  ~Worker();

  // Waits until all calls started before are complete, but for receives. Throws InvalidArgument if
  // another thread is inside or waits (see Worker()), or this one is, and Timeout if the turn does
  // not come within `limit`. Inside a `then` or a ReentrantTurn it returns at once.
  Turn take_turn(std::chrono::nanoseconds limit);
  // Inside a `then`, `body` runs at once: a wait for the Work there must not block the thread
  // that would run it, and the order is the same as for a `then` that was added too late for the
  // worker and runs on the adding thread.
  std::shared_ptr<Work> start(Body body, Then then);
  // Starts a call and runs it on this thread, if nothing else is under way and `can()` is true
  // then; otherwise returns null.
  template <typename Can, typename Run>
  std::shared_ptr<Work> run_at_once(const Can& can, const Run& body, const Then& then);
  // While it lives, the calls of this thread, which has the turn, are part of that turn.
  class ReentrantTurn {
   public:
    explicit ReentrantTurn(Worker& worker) : thread_(worker.state_->reentrant_thread) {
      thread_ = std::this_thread::get_id();
    }
    ReentrantTurn(const ReentrantTurn&) = delete;
    ReentrantTurn& operator=(const ReentrantTurn&) = delete;
    ~ReentrantTurn() { thread_ = std::thread::id(); }

   private:
    std::atomic<std::thread::id>& thread_;
  };
  // Starts a receive; other calls do not wait for it. `body` receives at once, inside a `then`.
  // `deferrable`: if nothing else is under way, the receive begins with the first use of its Work,
  // on the thread that waits for it, or with the next receive, or with end_deferral().
  std::shared_ptr<Work> start_receive(const PendingReceive& receive, bool deferrable, Body body,
                                      Then then);
  // From any thread: the worker waits for a deferred receive.
  void end_deferral();
  // Runs `body` between two calls, after all started ones and the caller inside; not at all on a
  // thread that is itself inside a call.
  void run_exclusive(const Body& body);
  // True if a call runs or waits.
  bool busy() const;
  const Receiver& receiver() const { return state_->receiver; }
  // Whether a call that is no receive runs or waits.
  bool runs_calls() const;
  // The receives that wait, in order; none if another thread changes them now.
  std::vector<PendingReceive> waiting_receives() const;
  // Whether a receive waits, so that one that begins now must wait behind it.
  bool receives() const { return state_->receives_pending.load(); }
  // Rejects new calls, and ends the thread after the started calls and the caller inside. A thread
  // that calls join() inside a `then` may destroy the worker there.
  void join();

 private:
  class Change;
  class Started;
  using Lock = std::unique_lock<std::mutex>;
  // State of the thread. It may outlive the worker until the end of the `then` that destroyed it.
  struct State {
    State(Receiver how, bool several) : receiver(std::move(how)), thread_multiple(several) {}
    bool is_idle() const { return queue.empty() && receives.empty() && !worker_inside; }
    bool may_receive() const {
      return !receives.empty() && queue.empty() &&
             (ending || (waiting == 0 && !caller.is_inside()));
    }
    // Whether the first of the queue is a call that the worker may run.
    bool may_run() const;
    // Whether it is the turn of the caller that waits as `turn`.
    bool is_turn_of(const Started& turn) const;
    // Whether this thread is inside, or waits for its turn and is in a callback.
    bool is_called_by_this_thread() const;
    // Throws InvalidArgument if this thread must not enter or start a call.
    void check_thread() const;
    // For a call that must not wait for receives.
    void suspend_receives() const {
      if (receiving) receiver.suspend();
    }
    // Leaves the deferred receive to the worker.
    void end_deferral() {
      if (deferred) receives.push_back(std::move(deferred));
    }
    void settle();

    const Receiver receiver;
    const bool thread_multiple;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Started>> queue;     // calls but receives, and waiting callers
    std::deque<std::shared_ptr<Started>> receives;  // for the worker
    std::shared_ptr<Started> deferred;              // a receive that no thread waits for yet
    std::atomic<bool> receives_pending{false};
    bool worker_inside = false, ending = false;  // or a thread that replaces the worker
    bool receiving = false;                      // it waits in receiver.wait()
    int waiting = 0;                             // threads in run_exclusive()
    Caller caller;
    std::atomic<std::thread::id> thread;
    std::atomic<std::thread::id> reentrant_thread;  // see ReentrantTurn
  };
  Clock::time_point enter(std::chrono::nanoseconds limit);
  std::shared_ptr<Work> add(const std::shared_ptr<Started>& started, bool deferrable = false);
  static void loop(State& state);
  static void run_next(State& state, Lock& lock);
  static std::pair<std::shared_ptr<Started>, std::exception_ptr> receive_next(State& state,
                                                                              Lock& lock);
  static void complete_next_receive(State& state, Lock& lock);
  static void receive_here(State& state, const Started& receive);
  void leave_at_once();

  std::function<bool()> interrupted_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// A call that ran at once.
class EndedWork final : public Work {
 public:
  explicit EndedWork(std::exception_ptr error) : error_(std::move(error)) {}
  bool done() const override { return true; }
  void wait(std::chrono::nanoseconds /*limit*/) override {
    if (error_) std::rethrow_exception(error_);
  }
  std::exception_ptr error() const override { return error_; }

 private:
  const std::exception_ptr error_;
};

template <typename Can, typename Run>
std::shared_ptr<Work> Worker::run_at_once(const Can& can, const Run& body, const Then& then) {
  if (!state_->caller.try_enter_at_once()) return nullptr;
  std::exception_ptr error;
  bool runs = false;
  try {
    runs = can();
    if (runs) body();
  } catch (...) {
    error = std::current_exception();
  }
  leave_at_once();
  if (!runs && !error) return nullptr;
  if (then) then(error);
  return std::make_shared<EndedWork>(error);
}

}  // namespace pycomm::group
