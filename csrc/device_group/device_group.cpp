#include "device_group/device_group.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "device_group/device_executor.h"
#include "device_group/executors.h"
#include "device_group/launch_order.h"
#include "device_group/watchdog.h"
#include "engine/engine.h"
#include "group/check.h"
#include "observe/heartbeat_thread.h"

namespace pycomm::device_group {
namespace {

// How often enqueued calls are polled. Polling does not slow them.
constexpr std::chrono::milliseconds kWatchInterval{100};

// How long close() waits for NCCL once all calls are complete.
constexpr std::chrono::seconds kCloseTimeout{5};

// An asynchronous call. The host group's worker runs the agreement and then enqueues the call.
class DeviceWork final : public group::Work {
 public:
  // `is_over`: whether the device has reached the call's event and the call was not aborted.
  explicit DeviceWork(std::function<bool(const device::Event&)> is_over)
      : is_over_(std::move(is_over)) {}

  void capture() { captured_ = true; }
  bool captured() const override { return captured_; }
  // Sets the agreement, after which the worker calls complete().
  void set_agreement(std::shared_ptr<group::Work> agreed) { agreed_ = std::move(agreed); }
  void complete(std::shared_ptr<device::Event> end_event, std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      end_event_ = std::move(end_event);
      if (error) error_ = std::move(error);  // fail() may come first
      completed_ = true;
    }
    changed_.notify_all();
  }
  // The call was enqueued but aborted before it completed.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  // A captured call is done once it is enqueued; so is a call on a device that reports an error.
  bool done() const override {
    std::shared_ptr<device::Event> end_event;
    {
      const std::lock_guard lock(mutex_);
      if (!completed_) return false;
      if (error_ || captured_) return true;
      end_event = end_event_;
    }
    try {
      return is_over_(*end_event);    // unlocked: fail() takes the lock
    } catch (const InternalError&) {  // the next use of the device reports it
      return true;
    }
  }
  std::exception_ptr error() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void wait(std::chrono::nanoseconds limit) override {
    if (agreed_) agreed_->wait(limit);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return completed_; });  // short: only enqueueing remains
    if (error_) std::rethrow_exception(error_);
  }
  void make_stream_wait(void* stream) override {
    const std::lock_guard lock(mutex_);
    check(completed_ && end_event_, "wait() must return before make_stream_wait()");
    end_event_->stream_wait(stream);
  }

 private:
  std::function<bool(const device::Event&)> is_over_;
  std::shared_ptr<group::Work> agreed_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool completed_ = false, captured_ = false;
  std::shared_ptr<device::Event> end_event_;
  std::exception_ptr error_;
};

// "send(float32, count 10, tag 0, nccl, on CUDA devices) to rank 1"
std::string text_of(const group::Call& call) {
  transport::Header header =
      group::signature_of(group::agreement_about(call, nullptr), call.algorithm);
  if (group::is_plan(call.operation)) return engine::describe(header);
  header.operation = static_cast<uint8_t>(call.operation);  // in signatures both ends are a send
  const bool sends = call.operation == Operation::send;
  return engine::describe(header) + (sends ? " to rank " : " from rank ") +
         std::to_string(call.peer);
}

// For a receive, after the agreement: stores the source rank.
void set_source(group::Call& call, int source) {
  if (call.operation != Operation::recv) return;
  call.peer = source;
  if (call.source != nullptr) *call.source = source;
}

// One thread at a time inside a group; others wait for it.
class Turns {
 public:
  // Throws Timeout.
  void take(std::chrono::nanoseconds limit) {
    std::unique_lock lock(mutex_);
    if (!given_up_.wait_for(lock, limit, [this] { return !taken_; }))
      throw Timeout("another thread was inside calls of this group for " +
                    std::to_string(std::chrono::duration<double>(limit).count()) + " s");
    taken_ = true;
  }
  void give_up() {
    {
      const std::lock_guard lock(mutex_);
      taken_ = false;
    }
    given_up_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards taken_
  std::condition_variable given_up_;
  bool taken_ = false;
};

class Turn {
 public:
  Turn(Turns& turns, std::chrono::nanoseconds limit) : turns_(turns) { turns_.take(limit); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { turns_.give_up(); }

 private:
  Turns& turns_;
};

class DeviceGroup final : public group::Collectives,
                          public std::enable_shared_from_this<DeviceGroup> {
 public:
  DeviceGroup(std::shared_ptr<group::Group> host, DeviceResources resources,
              std::chrono::nanoseconds timeout)
      : host_(std::move(host)),
        device_(resources.device),
        timeout_(timeout),
        events_(std::make_shared<device::EventPool>(device_)),
        order_(LaunchOrder::of(device_->bus_id())),
        executors_(host_, std::move(resources), timeout),
        watchdog_(*host_,
                  [this](const std::string& what) { return executors_.async_error(what); }) {
    watchdog_thread_.start(kWatchInterval, [this] { return look(); });
  }
  ~DeviceGroup() override { watchdog_thread_.join(); }

  const group::GroupInfo& info() const override { return host_->info(); }

  void run(const group::Call& given) override;
  std::shared_ptr<group::Work> start(const group::Call& given,
                                     std::function<void(std::exception_ptr)> then) override;
  group::Stats stats() const override;
  void form(std::chrono::nanoseconds limit) override {
    const Turn turn(turns_, limit);
    executors_.form(limit);
  }
  bool formed() const override { return executors_.of_all() != nullptr; }
  std::shared_ptr<device::Event> make_event() override { return events_->take(); }
  void close() noexcept override;
  void abort(const std::string& reason) noexcept override {
    fail(GroupBroken("the group was aborted: " + reason, {.rank = rank()}));
  }

 private:
  std::chrono::nanoseconds limit_of(const group::Call& call) const {
    return call.timeout.count() == 0 ? timeout_ : call.timeout;
  }
  DeviceCall begin(const group::Call& given);
  // What enqueue() needs besides the call. `ticket`: none for a message.
  struct Launch {
    std::shared_ptr<device::Event> before;
    Deadline deadline;
    std::shared_ptr<LaunchOrder::Ticket> ticket;
    std::function<void(std::exception_ptr)> failed{};
  };
  Launch launch_of(const DeviceCall& device_call);
  std::shared_ptr<device::Event> enqueue(DeviceCall& device_call, const Launch& launch);
  DeviceExecutor& executor_for(DeviceCall& device_call, const Deadline& deadline);
  bool look() noexcept;
  void fail(const Error& error) noexcept;

  std::shared_ptr<group::Group> host_;
  std::shared_ptr<device::Device> device_;
  const std::chrono::nanoseconds timeout_;
  Turns turns_;  // of run() and start()
  std::shared_ptr<device::EventPool> events_;
  const std::shared_ptr<LaunchOrder> order_;
  mutable std::mutex mutex_;  // guards the calls of executors_, and calls_
  Executors executors_;
  uint64_t calls_ = 0;
  Watchdog watchdog_;
  std::mutex ending_;  // guards ended_, cause_, and calls that enter the watchdog
  bool ended_ = false;
  std::optional<Error> cause_;  // none if close() ended the group
  observe::HeartbeatThread
      watchdog_thread_;  // last member: its thread ends before the members it uses
};

// Call it on the caller's thread, before the agreement. The event on the caller's stream is the one
// after which the call begins.
DeviceGroup::Launch DeviceGroup::launch_of(const DeviceCall& device_call) {
  const group::Call& call = device_call.call;
  Launch launch{.before = events_->take(), .deadline = Deadline(call.timeout), .ticket = nullptr};
  launch.before->record(call.device.stream);
  if (group::is_plan(call.operation))
    launch.ticket = order_->take(std::string(name_of(call.operation)) + " of group " + info().name);
  return launch;
}

// Rejects what this rank can reject without its peers. The algorithm of a message is known once its
// executor is.
DeviceCall DeviceGroup::begin(const group::Call& given) {
  if (given.algorithm == Algorithm::shared_memory)
    group::throw_unsupported(given, "the algorithm shared_memory is for arrays in host memory");
  group::Call call = given;
  call.timeout = limit_of(given);
  const bool is_message = !group::is_plan(given.operation);
  if (!is_message) executors_.form(call.timeout);
  DeviceExecutor* const executor = executors_.of_all();
  call.algorithm = is_message ? Algorithm::direct : executor->algorithm_for(given);
  group::Call asked = call;
  if (is_for_devices(asked.algorithm) || is_message) asked.algorithm = Algorithm::automatic;
  group::check_call(asked, rank(), size());
  if (executor == nullptr) return {.call = call};
  const std::lock_guard lock(mutex_);
  return executor->prepare(call);
}

// For a call that the ranks agreed about.
DeviceExecutor& DeviceGroup::executor_for(DeviceCall& device_call, const Deadline& deadline) {
  group::Call& call = device_call.call;
  if (group::is_plan(call.operation)) return *executors_.of_all();
  DeviceExecutor& executor = executors_.for_message(call.peer, deadline);
  call.algorithm = Algorithm::automatic;
  call.algorithm = executor.algorithm_for(call);
  const std::lock_guard lock(mutex_);
  device_call = executor.prepare(call);
  return executor;
}

void DeviceGroup::run(const group::Call& given) {
  const Turn turn(turns_, limit_of(given));
  DeviceCall device_call = begin(given);
  const Launch launch = launch_of(device_call);
  int source = given.peer;
  host_->run(group::agreement_about(device_call.call, &source));
  set_source(device_call.call, source);
  enqueue(device_call, launch)->stream_wait(given.device.stream);
}

std::shared_ptr<group::Work> DeviceGroup::start(const group::Call& given,
                                                std::function<void(std::exception_ptr)> then) {
  const Turn turn(turns_, limit_of(given));
  const auto work =
      std::make_shared<DeviceWork>([weak = weak_from_this()](const device::Event& end_event) {
        const auto self = weak.lock();
        return !self ||
               self->watchdog_.is_over(end_event);  // a destroyed group has no calls in progress
      });
  DeviceCall device_call = begin(given);
  Launch launch = launch_of(device_call);
  launch.failed = [work](std::exception_ptr late) { work->fail(std::move(late)); };
  const auto source = std::make_shared<int>(given.peer);
  auto enqueued = [self = shared_from_this(), work, device_call, launch = std::move(launch), source,
                   then = std::move(then)](std::exception_ptr error) mutable {
    std::shared_ptr<device::Event> end_event;
    try {
      if (!error) {
        set_source(device_call.call, *source);
        end_event = self->enqueue(device_call, launch);
      }
      if (end_event && device_call.call.device.follower != nullptr)
        end_event->stream_wait(device_call.call.device.follower);
    } catch (...) {  // reported through the work
      error = std::current_exception();
    }
    if (launch.ticket) launch.ticket->end();  // also while others hold a copy of this function
    work->complete(std::move(end_event), error);
    if (then) then(error);
  };
  const group::Call agreement = group::agreement_about(device_call.call, source.get());
  if (device_->capturing(given.device.stream)) {  // on this thread: a capture may belong to it
    work->capture();
    host_->run(agreement);
    enqueued(nullptr);
  } else {
    work->set_agreement(host_->start(agreement, enqueued));
  }
  return work;
}

std::shared_ptr<device::Event> DeviceGroup::enqueue(DeviceCall& device_call, const Launch& launch) {
  DeviceExecutor& executor = executor_for(device_call, launch.deadline);
  try {
    const auto failed = [this] {
      const std::lock_guard ending(ending_);
      return cause_.has_value();
    };
    if (launch.ticket) launch.ticket->wait(launch.deadline, failed);
    const std::lock_guard lock(mutex_);
    ++calls_;
    const bool captured = device_->capturing(device_call.call.device.stream);
    const bool all = group::is_plan(device_call.call.operation);
    {
      const std::lock_guard ending(ending_);
      if (cause_) throw Error(*cause_);
      watchdog_.add(text_of(device_call.call), all ? Watchdog::kAllPeers : device_call.call.peer,
                    launch.deadline, launch.failed);
    }
    auto end_event = executor.enqueue(device_call, *launch.before);
    const std::lock_guard ending(ending_);
    if (cause_) throw Error(*cause_);  // the call's event passes without a result
    // Calls in a graph are not watched: the program that launches the graph waits for them.
    watchdog_.set_end(captured ? nullptr : end_event);
    return end_event;
  } catch (const Error& error) {  // the peers have enqueued the call
    fail(error);
    const std::lock_guard ending(ending_);
    throw Error(cause_.value_or(error));  // `error` may set_agreement from an earlier cause
  }
}

bool DeviceGroup::look() noexcept {
  try {
    const auto error = watchdog_.look();
    if (error) fail(*error);
    const std::lock_guard lock(ending_);
    return !ended_;
  } catch (const std::exception& error) {  // CUDA: an earlier kernel failed
    fail(InternalError(error.what(), {.rank = rank()}));
    return false;
  }
}

// Any thread. Aborts the calls in progress on this device and, through the host groups, on all
// ranks.
void DeviceGroup::fail(const Error& error) noexcept {
  {
    const std::lock_guard lock(ending_);
    if (std::exchange(ended_, true)) return;
    cause_ = error;
  }
  order_->wake();
  watchdog_.end(std::make_exception_ptr(Error(error)));
  host_->abort(error.what());  // first, so that peers learn the reason before they miss this rank
  executors_.abort(error.what());
}

// Waits for the enqueued calls first, as peers may need them.
void DeviceGroup::close() noexcept {
  const auto is_idle = [this] {
    const std::lock_guard lock(ending_);
    return ended_ || watchdog_.idle();
  };
  while (!is_idle() && look())  // polls: the device sends no notification
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  watchdog_thread_.join();
  const std::lock_guard lock(ending_);
  if (!std::exchange(ended_, true))
    executors_.close(Deadline(std::min<std::chrono::nanoseconds>(timeout_, kCloseTimeout)));
}

group::Stats DeviceGroup::stats() const {
  const std::lock_guard lock(mutex_);
  group::Stats stats = executors_.stats();
  stats.calls = calls_;
  return stats;
}

}  // namespace

std::shared_ptr<group::Collectives> make_device_group(std::shared_ptr<group::Group> host,
                                                      DeviceResources resources,
                                                      std::chrono::nanoseconds timeout) {
  return std::make_shared<DeviceGroup>(std::move(host), std::move(resources), timeout);
}

}  // namespace pycomm::device_group
