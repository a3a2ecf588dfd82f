#include "device_group/device_group.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_group/agreements.h"
#include "device_group/device_executor.h"
#include "device_group/device_work.h"
#include "device_group/executors.h"
#include "device_group/launch_order.h"
#include "device_group/turns.h"
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

// Makes the stream of OnDevice::follower, if there is one, wait.
void follow(const Events& end_events, void* follower) {
  if (follower == nullptr) return;
  for (const auto& end_event : end_events) end_event->stream_wait(follower);
}

// The error of an agreement, for a call that was enqueued before.
Error late_error(const Error& error) {
  if (error.kind() != ErrorKind::mismatch) return error;
  constexpr std::string_view kUsual = "no array was changed";
  std::string text = error.what();
  if (const size_t at = text.find(kUsual); at != std::string::npos)
    text.replace(at, kUsual.size(), "arrays may have changed");
  return Mismatch(text +
                      "; with cuda_agreement=\"after\" the call was enqueued before, so the group "
                      "cannot be used any more",
                  error.fields());
}

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
  std::shared_ptr<group::Work> start_messages(
      std::span<const group::Call> given,
      const std::function<void(std::exception_ptr)>& then) override;
  group::Stats stats() const override;
  bool broken() const override;
  void form(std::chrono::nanoseconds limit) override {
    const Turn turn(turns_, limit);
    executors_.form(limit);
  }
  bool formed() const override { return executors_.of_all() != nullptr; }
  std::shared_ptr<device::Event> make_event() override { return events_->take(); }
  void close_after_peers(std::chrono::nanoseconds wait) noexcept override;
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
    bool captured;  // into a graph
    std::function<void(std::exception_ptr)> failed{};
  };
  std::shared_ptr<DeviceWork> make_work();
  Launch launch_of(const group::Call& call);
  bool can_precede_agreement(const group::Call& call, const Launch& launch) const;
  void start_agreement(DeviceCall& device_call, const Launch& launch);
  void end_agreement(const std::exception_ptr& error) noexcept;
  void throw_cause();
  std::shared_ptr<device::Event> enqueue(const DeviceCall& device_call, const Launch& launch);
  std::shared_ptr<device::Event> enqueue_messages(std::vector<group::Call> calls,
                                                  const Launch& launch);
  using Put = std::function<std::shared_ptr<device::Event>()>;
  std::shared_ptr<device::Event> watch(std::span<const group::Call> calls, const Launch& launch,
                                       const Put& put);
  void run_messages(std::span<const group::Call> calls, const Launch& launch, Events& end_events);
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
  Agreements agreements_;
  uint64_t calls_ = 0;
  Watchdog watchdog_;
  mutable std::mutex ending_;  // guards ended_, cause_, and calls that enter the watchdog
  bool ended_ = false;
  std::optional<Error> cause_;  // none if close() ended the group
  observe::HeartbeatThread
      watchdog_thread_;  // last member: its thread ends before the members it uses
};

// Call it on the caller's thread, before the agreement. The event on the caller's stream is the one
// after which the call begins.
DeviceGroup::Launch DeviceGroup::launch_of(const group::Call& call) {
  Launch launch{.before = events_->take(),
                .deadline = Deadline(call.timeout),
                .ticket = nullptr,
                .captured = device_->capturing(call.device.stream)};
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
  if (!is_message) return executor->prepare(call);
  executor->prepare_messages({&call, 1});
  return {.call = call};
}

void DeviceGroup::run(const group::Call& given) {
  const Turn turn(turns_, limit_of(given));
  DeviceCall device_call = begin(given);
  const Launch launch = launch_of(device_call.call);
  if (can_precede_agreement(device_call.call, launch)) {
    start_agreement(device_call, launch);
  } else {
    int source = given.peer;
    try {
      host_->run(group::agreement_about(device_call.call, &source));
    } catch (const Error&) {  // it may follow from a mismatch of an earlier call
      agreements_.throw_mismatch();
      throw;
    }
    set_source(device_call.call, source);
  }
  enqueue(device_call, launch)->stream_wait(given.device.stream);
}

// Later calls must be enqueued later: so not while another call waits for its agreement, or for a
// call of another group.
bool DeviceGroup::can_precede_agreement(const group::Call& call, const Launch& launch) const {
  return launch.ticket && !launch.captured && executors_.of_all()->can_precede_agreement(call) &&
         agreements_.allows(call) && launch.ticket->is_first();
}

// On the worker, with the limit of the call. Call it before enqueue(): a call without an agreement
// would wait on the device until its limit.
void DeviceGroup::start_agreement(DeviceCall& device_call, const Launch& launch) {
  const auto agree = [self = shared_from_this(), deadline = launch.deadline,
                      call = group::agreement_about(device_call.call, nullptr)]() mutable {
    self->throw_cause();
    call.timeout = std::max(deadline.left(), std::chrono::nanoseconds(1));
    self->host_->run(call);
  };
  const auto ended = [self = shared_from_this(), pending = agreements_.count_pending()](
                         const std::exception_ptr& error) { self->end_agreement(error); };
  (void)host_->start_together(agree, ended);
  device_call.before_agreement = true;
}

// On the worker.
void DeviceGroup::end_agreement(const std::exception_ptr& error) noexcept {
  if (!error) return executors_.of_all()->agreed();
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    fail(late_error(known));
  } catch (const std::exception& other) {  // out of memory
    fail(InternalError(other.what(), {.rank = rank()}));
  }
}

// fail() stores the cause before calls report it, and ends the host group afterwards.
bool DeviceGroup::broken() const {
  const std::lock_guard lock(ending_);
  return cause_ || host_->broken();
}

// Throws why the group ended, unless it was closed.
void DeviceGroup::throw_cause() {
  const std::lock_guard lock(ending_);
  if (cause_) throw Error(*cause_);
}

std::shared_ptr<DeviceWork> DeviceGroup::make_work() {
  return std::make_shared<DeviceWork>([weak = weak_from_this()](const device::Event& end_event) {
    const auto self = weak.lock();
    return !self || self->watchdog_.is_over(end_event);  // a destroyed group has no calls
  });
}

std::shared_ptr<group::Work> DeviceGroup::start(const group::Call& given,
                                                std::function<void(std::exception_ptr)> then) {
  const Turn turn(turns_, limit_of(given));
  const auto work = make_work();
  DeviceCall device_call = begin(given);
  Launch launch = launch_of(device_call.call);
  launch.failed = [work](std::exception_ptr late) { work->fail(std::move(late)); };
  const bool precedes = can_precede_agreement(device_call.call, launch);
  const bool captured = launch.captured;
  if (precedes) start_agreement(device_call, launch);
  const auto source = std::make_shared<int>(given.peer);
  auto enqueued = [self = shared_from_this(), work, device_call, launch = std::move(launch), source,
                   waiting = agreements_.count_waiting(),
                   then = std::move(then)](std::exception_ptr error) mutable {
    Events end_events;
    try {
      if (error) {  // it may follow from a mismatch of an earlier call
        self->agreements_.throw_mismatch();
      } else {
        set_source(device_call.call, *source);
        end_events.push_back(self->enqueue(device_call, launch));
        follow(end_events, device_call.call.device.follower);
      }
    } catch (...) {  // reported through the work
      error = std::current_exception();
    }
    if (launch.ticket) launch.ticket->end();  // also while others hold a copy of this function
    waiting.reset();
    work->complete(std::move(end_events), error);
    if (then) then(error);
  };
  if (precedes) return enqueued(nullptr), work;
  const group::Call agreement = group::agreement_about(device_call.call, source.get());
  if (captured) {  // on this thread: a capture may belong to it
    work->capture();
    host_->run(agreement);
    enqueued(nullptr);
  } else {
    work->set_agreement(host_->start(agreement, enqueued));
  }
  return work;
}

std::shared_ptr<group::Work> DeviceGroup::start_messages(
    std::span<const group::Call> given, const std::function<void(std::exception_ptr)>& then) {
  std::vector<group::Call> calls(given.begin(), given.end());
  const auto limit = limit_of(calls.front());
  const Turn turn(turns_, limit);
  const auto work = make_work();
  for (group::Call& call : calls) call = begin(call).call;
  if (DeviceExecutor* const executor = executors_.of_all()) {
    const std::lock_guard lock(mutex_);
    executor->prepare_messages(calls);
  }
  Launch launch = launch_of(calls.front());
  launch.failed = [work](std::exception_ptr late) { work->fail(std::move(late)); };
  const bool captured = launch.captured;
  const auto end_events = std::make_shared<Events>();
  const auto body = [self = shared_from_this(), calls = std::move(calls),
                     launch = std::move(launch),
                     end_events] { self->run_messages(calls, launch, *end_events); };
  auto completed = [work, end_events, then, waiting = agreements_.count_waiting()](
                       const std::exception_ptr& error) mutable {
    waiting.reset();
    work->complete(*end_events, error);
    if (then) then(error);
  };
  if (!captured) {
    work->set_agreement(host_->start_together(body, completed));
    return work;
  }
  work->capture();
  host_->run_together(body, limit);
  completed(nullptr);
  return work;
}

// On the worker or, for a capture, on the caller's thread.
void DeviceGroup::run_messages(std::span<const group::Call> calls, const Launch& launch,
                               Events& end_events) {
  std::optional<Error> mismatch;
  for (const std::span<const group::Call> part : executors_.concurrent_parts(calls)) {
    std::vector<group::Call> asked;
    for (const group::Call& call : part) asked.push_back(group::agreement_about(call, call.source));
    group::AgreedCalls found = host_->exchange(asked);
    if (!mismatch) mismatch = std::move(found.mismatch);
    std::map<int, std::vector<group::Call>> by_executor;
    for (group::Call& call : found.agreed) {
      call.device.agreement = false;
      by_executor[executors_.of_all() != nullptr ? group::kAnySource : call.peer].push_back(call);
    }
    for (auto& [peer, messages] : by_executor) {
      end_events.push_back(enqueue_messages(std::move(messages), launch));
      follow({end_events.back()}, calls.front().device.follower);
    }
  }
  if (mismatch) throw Error(*mismatch);
}

std::shared_ptr<device::Event> DeviceGroup::enqueue(const DeviceCall& device_call,
                                                    const Launch& launch) {
  if (!group::is_plan(device_call.call.operation))
    return enqueue_messages({device_call.call}, launch);
  DeviceExecutor& executor = *executors_.of_all();
  auto end_event = watch({&device_call.call, 1}, launch,
                         [&] { return executor.enqueue(device_call, *launch.before); });
  if (!device_call.before_agreement && executor.can_precede_agreement(device_call.call))
    agreements_.learn(device_call.call);
  return end_event;
}

// Messages of one executor.
std::shared_ptr<device::Event> DeviceGroup::enqueue_messages(std::vector<group::Call> calls,
                                                             const Launch& launch) {
  DeviceExecutor& executor = executors_.for_message(calls.front().peer, launch.deadline);
  for (group::Call& call : calls) call.algorithm = executor.algorithm_for_messages();
  {
    const std::lock_guard lock(mutex_);
    executor.prepare_messages(calls);
  }
  return watch(calls, launch, [&] { return executor.enqueue_messages(calls, *launch.before); });
}

// Enqueues a collective, or messages, with `put`, after the ranks agreed.
std::shared_ptr<device::Event> DeviceGroup::watch(std::span<const group::Call> calls,
                                                  const Launch& launch, const Put& put) {
  try {
    const auto failed = [this] {
      const std::lock_guard ending(ending_);
      return cause_.has_value();
    };
    if (launch.ticket) launch.ticket->wait(launch.deadline, failed);
    const std::lock_guard lock(mutex_);
    calls_ += calls.size();
    std::string text = text_of(calls.front());
    if (calls.size() > 1) text += " and " + std::to_string(calls.size() - 1) + " more messages";
    std::vector<int> peers;
    for (const group::Call& call : calls)
      if (!group::is_plan(call.operation)) peers.push_back(call.peer);
    {
      const std::lock_guard ending(ending_);
      if (cause_) throw Error(*cause_);
      watchdog_.add(std::move(text), std::move(peers), launch.deadline, launch.failed);
    }
    auto end_event = put();
    const std::lock_guard ending(ending_);
    if (cause_) throw Error(*cause_);  // the call's event passes without a result
    // Calls in a graph are not watched: the program that launches the graph waits for them.
    watchdog_.set_end(launch.captured ? nullptr : end_event);
    return end_event;
  } catch (const Error& error) {  // the peers have enqueued the call
    if (error.kind() == ErrorKind::peer_lost) {
      agreements_.wait_for_pending();  // a mismatch, of which the lost rank knew first
      fail(watchdog_.error_of_last(error));
    }
    fail(error);
    const std::lock_guard ending(ending_);
    throw Error(cause_.value_or(error));  // `error` may follow from an earlier cause
  }
}

bool DeviceGroup::look() noexcept {
  try {
    const auto error = watchdog_.look(agreements_.any_pending());
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
  agreements_.stop(error);
  order_->wake();
  watchdog_.end(std::make_exception_ptr(Error(error)));
  host_->abort(error.what());  // first, so that peers learn the reason before they miss this rank
  executors_.abort(error.what());
}

// Waits for the enqueued calls first, as peers may need them.
void DeviceGroup::close_after_peers(std::chrono::nanoseconds /*wait*/) noexcept {
  const auto is_idle = [this] {
    const std::lock_guard lock(ending_);
    return ended_ || (watchdog_.idle() && !agreements_.any_pending());
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
