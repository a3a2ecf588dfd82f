#include "group/worker.h"

#include <atomic>
#include <utility>

#include "core/deadline.h"

namespace pycomm {
namespace {

constexpr std::chrono::milliseconds kSlice{100};
constexpr std::chrono::hours kForever{24 * 365};

}  // namespace

class Worker::Started final : public Work {
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
    while (!changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kSlice, deadline.left()),
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

  void execute() {
    std::exception_ptr error;
    try {
      body_();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      error_ = error;
    }
    changed_.notify_all();
    if (then_) then_(error);
    body_ = {};  // lets go of what they hold while the caller may keep the work
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

Worker::~Worker() { join(); }

void Worker::run(const Body& body) {
  std::unique_lock lock(mutex_);
  if (caller_inside_)
    throw InvalidArgument(
        "another thread is inside a call of this group; use group.split() for each thread");
  caller_inside_ = true;
  struct Leave {
    Worker& worker;
    ~Leave() {
      const std::lock_guard lock(worker.mutex_);
      worker.caller_inside_ = false;
    }
  };
  const auto our_turn = [&] { return queue_.empty() && !worker_inside_; };
  while (!changed_.wait_for(lock, kSlice, our_turn)) {
    lock.unlock();
    const bool stop = interrupted_ && interrupted_();
    lock.lock();
    if (stop) {
      caller_inside_ = false;
      throw GroupBroken("waiting for earlier calls was interrupted");
    }
  }
  lock.unlock();
  const Leave leave{*this};
  body();
}

std::shared_ptr<Work> Worker::start(Body body, Then then) {
  auto started = std::make_shared<Started>(*this, std::move(body), std::move(then));
  {
    const std::lock_guard lock(mutex_);
    if (caller_inside_)
      throw InvalidArgument(
          "another thread is inside a call of this group; use group.split() for each thread");
    if (ending_) throw GroupBroken("this group was closed");
    queue_.push_back(started);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
  return started;
}

void Worker::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    worker_inside_ = true;
    auto next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    next->execute();
    next.reset();
    lock.lock();
    worker_inside_ = false;
    changed_.notify_all();
  }
}

bool Worker::busy() const {
  const std::lock_guard lock(mutex_);
  return caller_inside_ || worker_inside_ || !queue_.empty();
}

void Worker::join() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace pycomm
