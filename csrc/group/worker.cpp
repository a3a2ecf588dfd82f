#include "group/worker.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "os/thread.h"

namespace pycomm::group {
namespace {

constexpr std::chrono::hours kForever{24 * 365};

constexpr const char* kSecondThread =
    "another thread is inside a call of this group; use group.split() for each thread, or "
    "thread_multiple=True where the group is made";
constexpr const char* kSameThread =
    "this thread is inside a call of this group, and a signal handler or callback makes another";
constexpr const char* kClosed = "this group can no longer be used: it was closed";

}  // namespace

// Holds the mutex while the state changes. Callers cannot enter or leave on the fast path
// meanwhile.
class Worker::Change {
 public:
  explicit Change(State& state) : state_(state), lock_(state.mutex) {
    state.caller.disable_fast_path();
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;
  ~Change() { state_.settle(); }
  Lock& lock() { return lock_; }

 private:
  State& state_;
  Lock lock_;
};

// Ends a change: wakes the threads that wait for one, and lets callers enter without the lock again
// if nothing is under way.
void Worker::State::settle() {
  assert(!receiving || (worker_inside && !receives.empty()));
  assert(!deferred || (receives.empty() && !ending));
  receives_pending = deferred || !receives.empty();
  if (!ending && waiting == 0 && is_idle()) caller.enable_fast_path();
  if (ending || waiting > 0 || !queue.empty() || may_receive()) changed.notify_all();
}

class Worker::Started final : public Work {
 public:
  Started(Worker& worker, Body body, Then then, std::optional<PendingReceive> receive = {})
      : interrupted_(worker.interrupted_),
        state_(worker.state_),
        body_(std::move(body)),
        then_(std::move(then)),
        receive_(std::move(receive)) {}
  const std::optional<PendingReceive>& receive() const { return receive_; }
  // In the queue: it is not a call, but the place of a caller that waits for its turn.
  bool is_turn() const { return !body_; }
  bool is_from_this_thread() const { return from_ == std::this_thread::get_id(); }

  bool done() const override {
    end_deferral();
    return ended();
  }
  bool ended() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  std::exception_ptr error() const override {
    end_deferral();
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void wait(std::chrono::nanoseconds limit) override {
    limit.count() == 0 ? advance() : end_deferral();
    const Deadline deadline(limit.count() == 0 ? kForever : limit);
    Lock lock(mutex_);
    while (!changed_.wait_for(lock,
                              std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()),
                              [&] { return done_; })) {
      lock.unlock();
      if (interrupted_ && interrupted_()) throw GroupBroken("waiting for a call was interrupted");
      if (deadline.expired())
        throw Timeout("waited " + std::to_string(deadline.limit_s()) +
                      " s for a call that is still under way");
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
  }
  void advance() override {
    if (receive_) receive_here(*state_, *this);
    end_deferral();
  }

  std::exception_ptr run() {
    try {
      body_();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  void complete(const std::exception_ptr& error) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      error_ = error;
    }
    changed_.notify_all();
    if (then_) then_(error);
    body_ = {};  // release captures: the caller may keep the Work
    then_ = {};
  }

 private:
  void end_deferral() const {
    if (!receive_) return;
    const Change change(*state_);
    if (state_->deferred.get() == this) state_->end_deferral();
  }

  const std::function<bool()> interrupted_;
  const std::shared_ptr<State> state_;
  Body body_;
  Then then_;
  const std::optional<PendingReceive> receive_;  // of a receive
  const std::thread::id from_ = std::this_thread::get_id();
  mutable std::mutex mutex_;  // guards done_ and error_
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

Worker::~Worker() { join(); }

bool Worker::State::may_run() const {
  return !queue.empty() && !queue.front()->is_turn() && !caller.is_inside();
}

bool Worker::State::is_turn_of(const Started& turn) const {
  return queue.front().get() == &turn && !worker_inside && !caller.is_inside();
}

bool Worker::State::is_called_by_this_thread() const {
  return caller.is_this_thread() || std::ranges::any_of(queue, [](const auto& one) {
           return one->is_turn() && one->is_from_this_thread();
         });
}

void Worker::State::check_thread() const {
  if (thread_multiple) {
    if (is_called_by_this_thread()) throw InvalidArgument(kSameThread);
    return;
  }
  const auto waits = [](const auto& one) { return one->is_turn(); };
  if (caller.thread() != 0 || std::ranges::any_of(queue, waits))
    throw InvalidArgument(kSecondThread);
}

// Waits for the caller's turn. Returns when the wait began.
Clock::time_point Worker::enter(std::chrono::nanoseconds limit) {
  State& state = *state_;
  Change change(state);
  state.check_thread();
  if (state.ending) throw GroupBroken(kClosed);
  const auto since = Clock::now();
  const auto turn = std::make_shared<Started>(*this, Body{}, Then{});
  state.queue.push_back(turn);
  const auto leave = [&] { std::erase(state.queue, turn); };
  const auto ready = [&] { return state.ending || state.is_turn_of(*turn); };
  if (!ready()) {
    state.suspend_receives();
    const Deadline deadline(since, limit);
    Lock& lock = change.lock();
    while (!state.changed.wait_for(
        lock, std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()), ready)) {
      lock.unlock();
      const bool stop = interrupted_ && interrupted_();
      lock.lock();
      if (ready()) break;
      if (!stop && !deadline.expired()) continue;
      leave();
      if (stop) throw GroupBroken("waiting for earlier calls was interrupted");
      throw Timeout("Timed out after " + std::to_string(deadline.limit_s()) +
                    " s, waiting for calls of this rank that were started before and are still "
                    "under way" +
                    (state.caller.thread() != 0
                         ? "; thread " + std::to_string(state.caller.thread()) + " is inside"
                         : ""));
    }
  }
  leave();
  if (state.ending) throw GroupBroken(kClosed);
  state.caller.enter();
  return since;
}

Worker::Turn Worker::take_turn(std::chrono::nanoseconds limit) {
  const auto me = std::this_thread::get_id();
  if (state_->thread == me || state_->reentrant_thread == me) return {nullptr, Clock::now()};
  if (state_->caller.try_enter()) return {state_.get(), Clock::now()};
  return {state_.get(), enter(limit)};
}

Worker::Turn::~Turn() {
  if (state_ == nullptr || state_->caller.try_leave()) return;
  const Change change(*state_);
  state_->caller.leave();
}

void Worker::run_exclusive(const Body& body) {
  State& state = *state_;
  Change change(state);
  ++state.waiting;
  state.suspend_receives();
  if (!state.is_called_by_this_thread()) {
    state.changed.wait(change.lock(), [&] {
      return state.thread == std::this_thread::get_id() ||
             (!state.caller.is_inside() && !state.worker_inside && state.queue.empty());
    });
    body();  // locked: calls wait
  }
  --state.waiting;
}

std::shared_ptr<Work> Worker::start(Body body, Then then) {
  return add(std::make_shared<Started>(*this, std::move(body), std::move(then)));
}

void Worker::leave_at_once() {
  if (state_->caller.try_leave_at_once()) return;
  const Change change(*state_);
  state_->caller.leave();
}

std::shared_ptr<Work> Worker::start_receive(const PendingReceive& receive, bool deferrable,
                                            Body body, Then then) {
  return add(std::make_shared<Started>(*this, std::move(body), std::move(then), receive),
             deferrable);
}

// Adds a call to the worker's, or executes it at once inside a `then`.
std::shared_ptr<Work> Worker::add(const std::shared_ptr<Started>& started, bool deferrable) {
  State& state = *state_;
  if (state.thread == std::this_thread::get_id()) {
    started->complete(started->run());
    return started;
  }
  const Change change(state);
  if (state.ending) throw GroupBroken(kClosed);
  if (!thread_.joinable()) {  // first: queue nothing if no thread can be created
    thread_ = os::start_thread("pycomm-worker", [held = state_] { loop(*held); });
    state.thread = thread_.get_id();
  }
  state.check_thread();
  if (deferrable && !state.deferred && state.is_idle()) {
    state.deferred = started;
    return started;
  }
  if (started->receive()) {
    state.end_deferral();
    state.receives.push_back(started);
  } else {
    state.queue.push_back(started);
  }
  state.suspend_receives();  // to run this one first, or to wait for it too
  return started;
}

void Worker::loop(State& state) {
  Lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] {
      return !state.worker_inside &&
             (state.may_run() || state.may_receive() || (state.ending && state.queue.empty()));
    });
    if (state.queue.empty() && state.receives.empty()) return;
    state.worker_inside = true;
    state.queue.empty() ? complete_next_receive(state, lock) : run_next(state, lock);
    state.worker_inside = false;
    state.settle();
  }
}

void Worker::run_next(State& state, Lock& lock) {
  auto next = std::move(state.queue.front());
  state.queue.pop_front();
  lock.unlock();
  next->complete(next->run());
  next.reset();
  lock.lock();
}

// Returns the receive that is complete and its error; null if the wait was suspended.
std::pair<std::shared_ptr<Worker::Started>, std::exception_ptr> Worker::receive_next(State& state,
                                                                                     Lock& lock) {
  std::vector<const PendingReceive*> pending;
  for (const auto& one : state.receives) pending.push_back(&*one->receive());
  state.receiving = true;
  state.receiver.resume();
  lock.unlock();
  const auto completed = state.receiver.wait(pending);
  lock.lock();
  state.receiving = false;
  if (!completed) return {};
  const auto found = state.receives.begin() + static_cast<std::ptrdiff_t>(completed->index);
  auto one = std::move(*found);
  state.receives.erase(found);
  state.receives_pending = !state.receives.empty();
  return {std::move(one), completed->error};
}

void Worker::complete_next_receive(State& state, Lock& lock) {
  auto [one, error] = receive_next(state, lock);
  lock.unlock();
  if (one) one->complete(error);
  one.reset();
  lock.lock();
}

// On this thread, as the worker would, if nothing else is under way: until the receive is complete
// or another call needs the turn.
void Worker::receive_here(State& state, const Started& receive) {
  std::shared_ptr<Started> one;
  std::exception_ptr error;
  {
    Change change(state);
    if (state.caller.is_inside() || state.waiting > 0 || !state.is_idle()) return;
    if (state.deferred.get() != &receive) return;
    state.worker_inside = true;
    state.end_deferral();
    std::tie(one, error) = receive_next(state, change.lock());
    state.worker_inside = false;
  }
  if (one) one->complete(error);
}

void Worker::end_deferral() {
  const Change change(*state_);
  state_->end_deferral();
}

bool Worker::busy() const {
  const std::lock_guard lock(state_->mutex);
  return state_->caller.is_inside() || state_->deferred || !state_->is_idle();
}

bool Worker::runs_calls() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->queue.empty() || (state_->worker_inside && !state_->receiving);
}

std::vector<PendingReceive> Worker::waiting_receives() const {
  if (!receives()) return {};
  const Lock lock(state_->mutex, std::try_to_lock);  // run_exclusive() holds it while it runs
  if (!lock || state_->receiving) return {};         // one of them may be complete already
  std::vector<PendingReceive> found;
  if (state_->deferred) found.push_back(*state_->deferred->receive());
  for (const auto& one : state_->receives) found.push_back(*one->receive());
  return found;
}

void Worker::join() {
  State& state = *state_;
  const auto me = std::this_thread::get_id();
  const bool in_then = state.thread == me;
  std::thread ended;
  {
    Change change(state);
    state.end_deferral();
    state.ending = true;
    std::erase_if(state.queue, [](const auto& one) {  // through `interrupted`, as below
      return one->is_turn() && one->is_from_this_thread();
    });
    state.changed.notify_all();
    const auto is_left = [&] { return state.queue.empty() || !state.queue.front()->is_turn(); };
    while (in_then && !state.queue.empty()) {
      state.changed.wait(change.lock(), is_left);
      if (!state.queue.empty()) run_next(state, change.lock());
    }
    while (in_then && !state.receives.empty()) complete_next_receive(state, change.lock());
    // A caller that joins inside its own call (through `interrupted`) does not wait for itself.
    state.changed.wait(change.lock(), [&] {
      const bool caller_out = !state.caller.is_inside() || state.caller.is_this_thread();
      return caller_out && (in_then || state.is_idle());
    });
    ended = std::move(thread_);
  }
  if (!ended.joinable()) return;
  in_then ? ended.detach() : ended.join();
}

}  // namespace pycomm::group
