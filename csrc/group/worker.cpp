#include "group/worker.h"

#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include "os/thread.h"

namespace pycomm::group {
namespace {

constexpr std::chrono::hours kForever{24 * 365};

constexpr const char* kSecondThread =
    "another thread is inside a call of this group; use group.split() for each thread";
constexpr const char* kClosed = "this group can no longer be used: it was closed";

}  // namespace

class Worker::Started : public Work {
 public:
  Started(Worker& worker, Body body, Then then)
      : interrupted_(worker.interrupted_), body_(std::move(body)), then_(std::move(then)) {}

  bool done() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  std::exception_ptr error() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  void wait(std::chrono::nanoseconds limit) override {
    const Deadline deadline(limit.count() == 0 ? kForever : limit);
    std::unique_lock lock(mutex_);
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

  void execute() { complete(run()); }
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
  std::function<bool()> interrupted_;
  Body body_;
  Then then_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Worker::Receiving final : public Started {
 public:
  Receiving(Worker& worker, const PendingReceive& receive, Body body, Then then)
      : Started(worker, std::move(body), std::move(then)),
        state_(worker.state_),
        receive_(receive) {}
  const PendingReceive& receive() const { return receive_; }

  bool done() const override { return end_deferral(), Started::done(); }
  std::exception_ptr error() const override { return end_deferral(), Started::error(); }
  void wait(std::chrono::nanoseconds limit) override {
    limit.count() == 0 ? advance() : end_deferral();
    Started::wait(limit);
  }
  void advance() override {
    receive_here(*state_, *this);
    end_deferral();
  }

 private:
  void end_deferral() const {
    const std::lock_guard lock(state_->mutex);
    if (state_->deferred.get() == this) state_->end_deferral();
  }

  std::shared_ptr<State> state_;
  PendingReceive receive_;
};

Worker::~Worker() { join(); }

// Waits for the caller's turn. Returns when the wait began.
Clock::time_point Worker::enter(std::chrono::nanoseconds limit) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.caller.disable_fast_path();
  const auto refuse = [&](const auto& error) {
    state.enable_fast_path();
    throw error;
  };
  if (state.caller.is_inside()) refuse(InvalidArgument(kSecondThread));
  if (state.ending) refuse(GroupBroken(kClosed));
  state.caller.enter();
  const auto leave = [&](const auto& error) {
    state.caller.leave();
    state.changed.notify_all();
    refuse(error);
  };
  const auto our_turn = [&] {
    return state.ending || (state.queue.empty() && !state.worker_inside);
  };
  const auto since = Clock::now();
  if (!our_turn()) {
    state.suspend_receives();
    const Deadline deadline(since, limit);
    while (!state.changed.wait_for(
        lock, std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()), our_turn)) {
      lock.unlock();
      const bool stop = interrupted_ && interrupted_();
      lock.lock();
      if (stop) leave(GroupBroken("waiting for earlier calls was interrupted"));
      if (deadline.expired() && !our_turn())
        leave(Timeout("Timed out after " + std::to_string(deadline.limit_s()) +
                      " s, waiting for calls of this rank that were started before and are still "
                      "under way"));
    }
  }
  if (state.ending) leave(GroupBroken(kClosed));
  state.enable_fast_path();
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
  const std::lock_guard lock(state_->mutex);
  state_->caller.leave();
  state_->changed.notify_all();
}

void Worker::run_exclusive(const Body& body) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.caller.disable_fast_path();
  ++state.waiting;
  state.suspend_receives();
  if (!state.caller.is_this_thread()) {
    state.changed.wait(lock, [&] {
      return state.thread == std::this_thread::get_id() ||
             (!state.caller.is_inside() && !state.worker_inside && state.queue.empty());
    });
    body();  // locked: calls wait
  }
  --state.waiting;
  state.enable_fast_path();
  state.changed.notify_all();
}

std::shared_ptr<Work> Worker::start(Body body, Then then) {
  auto started = std::make_shared<Started>(*this, std::move(body), std::move(then));
  return start_or_execute(started, [&](State& state) { state.queue.push_back(started); });
}

std::shared_ptr<Work> Worker::start_at_once(const std::function<bool()>& possible, Body body,
                                            Then then) {
  auto started = std::make_shared<Started>(*this, std::move(body), std::move(then));
  std::exception_ptr error;
  bool runs = false;
  replace_worker(*state_, [&](std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    runs = possible();
    if (runs) error = started->run();
    lock.lock();
  });
  if (runs) return started->complete(error), started;
  return start_or_execute(started, [&](State& state) { state.queue.push_back(started); });
}

std::shared_ptr<Work> Worker::start_receive(const PendingReceive& receive, bool deferrable,
                                            Body body, Then then) {
  auto started = std::make_shared<Receiving>(*this, receive, std::move(body), std::move(then));
  return start_or_execute(started, [&](State& state) {
    state.receives_pending = true;
    if (deferrable && !state.deferred && state.is_idle()) {
      state.deferred = started;
      return state.enable_fast_path();
    }
    state.end_deferral();
    state.receives.push_back(started);
  });
}

// Adds a call to the worker's, or executes it at once inside a `then`. `add` runs with the mutex,
// when the thread runs and no thread is inside a call.
std::shared_ptr<Work> Worker::start_or_execute(std::shared_ptr<Started> started,
                                               const std::function<void(State&)>& add) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.thread == std::this_thread::get_id()) {
    lock.unlock();
    started->execute();
    return started;
  }
  if (state.ending) throw GroupBroken(kClosed);
  if (!thread_.joinable()) {  // first: queue nothing if no thread can be created
    thread_ = os::start_thread("pycomm-worker", [held = state_] { loop(*held); });
    state.thread = thread_.get_id();
  }
  state.caller.disable_fast_path();
  if (state.caller.is_inside()) {
    state.enable_fast_path();
    throw InvalidArgument(kSecondThread);
  }
  add(state);
  if (state.is_idle()) return started;  // a deferred receive
  state.suspend_receives();             // to run this one first, or to wait for it too
  state.changed.notify_all();
  return started;
}

void Worker::loop(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] {
      return !state.worker_inside && (state.ending || !state.queue.empty() || state.may_receive());
    });
    if (state.queue.empty() && state.receives.empty()) return;
    state.worker_inside = true;
    state.queue.empty() ? complete_next_receive(state, lock) : run_next(state, lock);
    state.worker_inside = false;
    state.enable_fast_path();
    state.changed.notify_all();
  }
}

void Worker::run_next(State& state, std::unique_lock<std::mutex>& lock) {
  auto next = std::move(state.queue.front());
  state.queue.pop_front();
  lock.unlock();
  next->execute();
  next.reset();
  lock.lock();
}

// Returns the receive that is complete and its error; null if the wait was suspended.
std::pair<std::shared_ptr<Worker::Receiving>, std::exception_ptr> Worker::receive_next(
    State& state, std::unique_lock<std::mutex>& lock) {
  std::vector<const PendingReceive*> pending;
  for (const auto& one : state.receives) pending.push_back(&one->receive());
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

void Worker::complete_next_receive(State& state, std::unique_lock<std::mutex>& lock) {
  auto [one, error] = receive_next(state, lock);
  lock.unlock();
  if (one) one->complete(error);
  one.reset();
  lock.lock();
}

// Runs `body`, with the mutex, as the worker would, if nothing else is under way.
template <typename Run>
void Worker::replace_worker(State& state, const Run& body) {
  std::unique_lock lock(state.mutex);
  state.caller.disable_fast_path();
  if (!state.caller.is_inside() && !state.ending && state.waiting == 0 && state.is_idle()) {
    state.worker_inside = true;
    body(lock);
    state.worker_inside = false;
  }
  state.enable_fast_path();
  if (state.ending || state.waiting > 0 || state.caller.is_inside() || !state.is_idle())
    state.changed.notify_all();
}

// Until the receive is complete or another call needs the turn.
void Worker::receive_here(State& state, const Receiving& receive) {
  std::shared_ptr<Receiving> one;
  std::exception_ptr error;
  replace_worker(state, [&](std::unique_lock<std::mutex>& lock) {
    if (state.deferred.get() != &receive) return;
    state.receives.push_back(std::move(state.deferred));
    std::tie(one, error) = receive_next(state, lock);
  });
  if (one) one->complete(error);
}

void Worker::end_deferral() {
  const std::lock_guard lock(state_->mutex);
  state_->end_deferral();
}

bool Worker::busy() const {
  const std::lock_guard lock(state_->mutex);
  return state_->caller.is_inside() || state_->deferred || !state_->is_idle();
}

void Worker::join() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.end_deferral();
  state.ending = true;
  state.caller.disable_fast_path();
  state.changed.notify_all();
  const auto me = std::this_thread::get_id();
  const bool in_then = state.thread == me;
  while (in_then && !state.queue.empty()) run_next(state, lock);
  while (in_then && !state.receives.empty()) complete_next_receive(state, lock);
  // A caller that joins inside its own call (through `interrupted`) does not wait for itself.
  state.changed.wait(lock, [&] {
    const bool caller_out = !state.caller.is_inside() || state.caller.is_this_thread();
    return caller_out && (in_then || state.is_idle());
  });
  std::thread ended = std::move(thread_);
  lock.unlock();
  if (!ended.joinable()) return;
  in_then ? ended.detach() : ended.join();
}

}  // namespace pycomm::group
