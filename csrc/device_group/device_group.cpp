// A launch is a collective, or messages that are concurrent. Its states, and what makes each
// transition:
//
//   new        begin(): valid, with an event of the caller's stream and, for a collective, a ticket
//   agreed     the host group, on the caller's thread or the worker: all its ranks made the call
//   enqueued   enqueue(): the watchdog keeps it
//   complete   Watchdog::is_over() or look(): the device has reached the event of its end
//   failed     an error before it is enqueued, or fail() afterwards
//
// With DeviceOptions::agree_after it may be enqueued first: start_agreement(), enqueue(),
// end_agreement().
//
// The states of a group:
//
//   state       executors_.of_all()   watchdog_   transition made by
//   connecting  null                  no end      constructor; messages connect two ranks
//   formed      set                   no end      form(), begin() of a collective, or the first
//                                                 message of two ranks
//   failed      any                   a cause     fail(): of abort(), look(), enqueue(),
//                                                 end_agreement(), or close_after_peers()
//   closed      any                   no cause    close_after_peers()
//
// Invariants:
//
//   1. One thread at a time is inside run(), start(), start_messages() and form().
//   2. mutex_ is held inside the executors, which may wait there for other ranks. So fail() does
//      not take it, and calls only functions of the executors that any thread may call.
//   3. The watchdog has a launch before the executor does, so fail() finds each one.
//   4. A group ends once. The cause is stored before a Work, a call or a peer reports an error.
//   5. Peers learn the cause before this rank's communicators end.
//   6. The agreement of a launch that precedes it is started before the launch is enqueued: its
//      gate would close permanently otherwise.
//   7. No launch of a thread overtakes an earlier collective of that thread, in any group.
//   8. Each start() ends with one complete(), on every path.
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

#include "device_group/device_executor.h"
#include "device_group/device_work.h"
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

// How long close() waits for the calls in progress, and then for NCCL.
constexpr std::chrono::seconds kCallsTimeout{30}, kCloseTimeout{5};

// "send(float32, count 10, tag 0, nccl, on CUDA devices) to rank 1 and 2 more messages"
std::string text_of(std::span<const group::Call> calls) {
  const group::Call& call = calls.front();
  transport::Header header =
      group::signature_of(group::agreement_about(call, nullptr), call.algorithm);
  if (group::is_plan(call.operation)) return engine::describe(header);
  header.operation = static_cast<uint8_t>(call.operation);  // in signatures both ends are a send
  const bool sends = call.operation == Operation::send;
  std::string text =
      engine::describe(header) + (sends ? " to rank " : " from rank ") + std::to_string(call.peer);
  if (calls.size() > 1) text += " and " + std::to_string(calls.size() - 1) + " more messages";
  return text;
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

// Streams are never destroyed, as torch's allocator may keep memory that was used on one. The next
// holder reuses it.
std::shared_ptr<void> take_stream_of(const std::shared_ptr<device::Device>& device) {
  struct Free {
    std::mutex mutex;
    std::map<std::string, std::vector<void*>> by_device;
  };
  static auto& free = *new Free;  // never destroyed
  const std::string bus_id = device->bus_id();
  const std::lock_guard lock(free.mutex);
  std::vector<void*>& streams = free.by_device[bus_id];
  if (streams.empty()) streams.push_back(device->make_stream());
  void* const stream = streams.back();
  streams.pop_back();
  return {stream, [bus_id](void* over) {
            const std::lock_guard held(free.mutex);
            free.by_device[bus_id].push_back(over);
          }};
}

// A launch whose caller does not wait for it.
struct AsyncLaunch : Launch {
  std::function<void(std::exception_ptr)> then{};
  LaunchOrder::Count waiting{};
  int source = group::kAnySource;
  Events end_events{};

  void complete(const std::exception_ptr& error) {
    if (ticket) ticket->end();  // also while others hold this
    waiting.reset();
    work->complete(std::move(end_events), error);
    if (then) then(error);
  }
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
        order_(device_->bus_id()),
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
  // fail() stores the cause before calls report it, and ends the host group afterwards.
  bool broken() const override { return watchdog_.cause().has_value() || host_->broken(); }
  void form(std::chrono::nanoseconds limit) override {
    const auto turn = order_.enter(limit);
    executors_.form(limit);
  }
  bool formed() const override { return executors_.of_all() != nullptr; }
  std::shared_ptr<device::Event> make_event() override { return events_->take(); }
  std::shared_ptr<void> take_stream() override { return take_stream_of(device_); }
  void close_after_peers(std::chrono::nanoseconds wait) noexcept override;
  void abort(const std::string& reason) noexcept override {
    fail(GroupBroken("the group was aborted: " + reason, {.rank = rank()}));
  }

 private:
  std::chrono::nanoseconds limit_of(const group::Call& call) const {
    return call.timeout.count() == 0 ? timeout_ : call.timeout;
  }
  void begin(Launch& launch, std::span<const group::Call> given);
  void prepare(DeviceExecutor& executor, Launch& launch);
  std::shared_ptr<AsyncLaunch> begin_async(std::span<const group::Call> given,
                                           std::function<void(std::exception_ptr)> then);
  bool can_precede_agreement(const Launch& launch) const;
  void start_agreement(Launch& launch);
  void end_agreement(const std::exception_ptr& error) noexcept;
  void throw_cause();
  std::shared_ptr<device::Event> enqueue(Launch& launch);
  void enqueue_agreed(AsyncLaunch& launch, std::exception_ptr error);
  void run_messages(AsyncLaunch& launch);
  bool look() noexcept;
  void fail(const Error& error) noexcept;

  std::shared_ptr<group::Group> host_;
  std::shared_ptr<device::Device> device_;
  const std::chrono::nanoseconds timeout_;
  std::shared_ptr<device::EventPool> events_;
  LaunchOrder order_;
  mutable std::mutex mutex_;  // guards the calls of executors_, and calls_
  Executors executors_;
  uint64_t calls_ = 0;
  Watchdog watchdog_;
  observe::HeartbeatThread
      watchdog_thread_;  // last member: its thread ends before the members it uses
};

// Rejects what this rank can reject without its peers. On the caller's thread, before the
// agreement. The algorithm of a message is known once its executor is.
void DeviceGroup::begin(Launch& launch, std::span<const group::Call> given) {
  launch.calls.assign(given.begin(), given.end());
  for (group::Call& call : launch.calls) {
    if (call.algorithm == Algorithm::shared_memory)
      group::throw_unsupported(call, "the algorithm shared_memory is for arrays in host memory");
    call.timeout = limit_of(call);
    group::Call asked = call;
    if (launch.has_messages()) {
      call.algorithm = Algorithm::direct;
      asked.algorithm = Algorithm::automatic;
    } else {
      executors_.form(call.timeout);
      call.algorithm = asked.algorithm = executors_.of_all()->algorithm_for(call);
      if (is_for_devices(asked.algorithm)) asked.algorithm = Algorithm::automatic;
    }
    group::check_call(asked, rank(), size());
  }
  if (DeviceExecutor* const executor = executors_.of_all()) prepare(*executor, launch);
  launch.before = events_->take();
  launch.deadline = Deadline(launch.first().timeout);
  launch.captured = device_->capturing(launch.stream());
  launch.before->record(launch.stream());
  if (!launch.has_messages())
    launch.ticket =
        order_.take(std::string(name_of(launch.first().operation)) + " of group " + info().name);
}

// Peers would wait until their limit for a rank that has no memory for its call.
void DeviceGroup::prepare(DeviceExecutor& executor, Launch& launch) {
  try {
    const std::lock_guard lock(mutex_);
    executor.prepare(launch);
  } catch (const InternalError& error) {
    fail(error);
    throw;
  }
}

std::shared_ptr<AsyncLaunch> DeviceGroup::begin_async(
    std::span<const group::Call> given, std::function<void(std::exception_ptr)> then) {
  const auto launch = std::make_shared<AsyncLaunch>();
  begin(*launch, given);
  launch->then = std::move(then);
  launch->source = given.front().peer;
  launch->work =
      std::make_shared<DeviceWork>([weak = weak_from_this()](const device::Event& end_event) {
        const auto self = weak.lock();
        return !self || self->watchdog_.is_over(end_event);  // a destroyed group has no calls
      });
  if (launch->captured) launch->work->capture();
  return launch;
}

void DeviceGroup::run(const group::Call& given) {
  const auto turn = order_.enter(limit_of(given));
  Launch launch;
  begin(launch, {&given, 1});
  if (can_precede_agreement(launch)) {
    start_agreement(launch);
  } else {
    int source = given.peer;
    try {
      host_->run(group::agreement_about(launch.first(), &source));
    } catch (const Error&) {  // it may follow from a mismatch of an earlier call
      watchdog_.throw_mismatch();
      throw;
    }
    set_source(launch.calls.front(), source);
  }
  enqueue(launch)->stream_wait(given.device.stream);
}

bool DeviceGroup::can_precede_agreement(const Launch& launch) const {
  return !launch.has_messages() && !launch.captured && !watchdog_.ended() &&
         executors_.of_all()->can_precede_agreement(launch.first()) &&
         order_.may_precede(launch.first(), *launch.ticket);
}

// On the worker, with the limit of the call.
void DeviceGroup::start_agreement(Launch& launch) {
  const auto agree = [self = shared_from_this(), deadline = launch.deadline,
                      call = group::agreement_about(launch.first(), nullptr)]() mutable {
    self->throw_cause();
    call.timeout = std::max(deadline.left(), std::chrono::nanoseconds(1));
    self->host_->run(call);
  };
  const auto ended = [self = shared_from_this(), pending = order_.count_pending()](
                         const std::exception_ptr& error) { self->end_agreement(error); };
  (void)host_->start_together(agree, ended);
  launch.before_agreement = true;
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

// Throws why the group ended, unless it was closed.
void DeviceGroup::throw_cause() {
  if (const auto cause = watchdog_.cause()) throw Error(*cause);
}

std::shared_ptr<group::Work> DeviceGroup::start(const group::Call& given,
                                                std::function<void(std::exception_ptr)> then) {
  const auto turn = order_.enter(limit_of(given));
  const auto launch = begin_async({&given, 1}, std::move(then));
  const auto enqueued = [self = shared_from_this(), launch](const std::exception_ptr& error) {
    self->enqueue_agreed(*launch, error);
  };
  if (can_precede_agreement(*launch)) {
    start_agreement(*launch);
    enqueued(nullptr);
    return launch->work;
  }
  launch->waiting = order_.count_waiting();
  const group::Call agreement = group::agreement_about(launch->first(), &launch->source);
  if (launch->captured) {  // on this thread: a capture may belong to it
    host_->run(agreement);
    enqueued(nullptr);
  } else {
    launch->work->set_agreement(host_->start(agreement, enqueued));
  }
  return launch->work;
}

// `error`: of the agreement. Errors are reported through the work.
void DeviceGroup::enqueue_agreed(AsyncLaunch& launch, std::exception_ptr error) {
  try {
    if (error) {  // it may follow from a mismatch of an earlier call
      watchdog_.throw_mismatch();
    } else {
      set_source(launch.calls.front(), launch.source);
      launch.end_events.push_back(enqueue(launch));
      follow(launch.end_events, launch.first().device.follower);
    }
  } catch (...) {  // see above
    error = std::current_exception();
  }
  launch.complete(error);
}

std::shared_ptr<group::Work> DeviceGroup::start_messages(
    std::span<const group::Call> given, const std::function<void(std::exception_ptr)>& then) {
  const auto limit = limit_of(given.front());
  const auto turn = order_.enter(limit);
  const auto launch = begin_async(given, then);
  launch->waiting = order_.count_waiting();
  const auto body = [self = shared_from_this(), launch] { self->run_messages(*launch); };
  const auto completed = [launch](const std::exception_ptr& error) { launch->complete(error); };
  if (launch->captured) {  // as in start()
    host_->run_together(body, limit);
    completed(nullptr);
  } else {
    launch->work->set_agreement(host_->start_together(body, completed));
  }
  return launch->work;
}

// On the worker or, for a capture, on the caller's thread.
void DeviceGroup::run_messages(AsyncLaunch& launch) {
  std::optional<Error> mismatch;
  for (const std::span<const group::Call> part : executors_.concurrent_parts(launch.calls)) {
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
      Launch one = launch;
      one.calls = std::move(messages);
      launch.end_events.push_back(enqueue(one));
      follow({launch.end_events.back()}, launch.first().device.follower);
    }
  }
  if (mismatch) throw Error(*mismatch);
}

// Enqueues a launch that has one executor. Returns the event of its end. An error ends the group,
// as the peers enqueue the launch.
std::shared_ptr<device::Event> DeviceGroup::enqueue(Launch& launch) {
  const bool has_messages = launch.has_messages();
  DeviceExecutor& executor = has_messages
                                 ? executors_.for_message(launch.first().peer, launch.deadline)
                                 : *executors_.of_all();
  std::vector<int> peers;
  if (has_messages) {
    for (group::Call& call : launch.calls) {
      call.algorithm = executor.algorithm_for(call);
      peers.push_back(call.peer);
    }
    prepare(executor, launch);
  }
  try {
    const auto failed = [this] { return watchdog_.cause().has_value(); };
    if (launch.ticket) launch.ticket->wait(launch.deadline, failed);
    const std::lock_guard lock(mutex_);
    calls_ += launch.calls.size();
    watchdog_.add(text_of(launch.calls), std::move(peers), launch.deadline, launch.work);
    auto end_event = executor.enqueue(launch);
    // Launches of a graph are not watched: the program that launches the graph waits for them.
    watchdog_.set_end(launch.captured ? nullptr : end_event);
    if (!has_messages && !launch.before_agreement && executor.can_precede_agreement(launch.first()))
      order_.learn(launch.first());
    return end_event;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::peer_lost) {
      order_.wait_for_pending();  // a mismatch, of which the lost rank knew first
      fail(watchdog_.error_of_last(error));
    }
    fail(error);
    throw_cause();  // `error` may follow from an earlier one
    throw;
  }
}

bool DeviceGroup::look() noexcept {
  try {
    const auto error = watchdog_.look(order_.any_pending());
    if (error) fail(*error);
    return !watchdog_.ended();
  } catch (const std::exception& error) {  // CUDA: an earlier kernel failed
    fail(InternalError(error.what(), {.rank = rank()}));
    return false;
  }
}

// Any thread. Aborts the calls in progress on this device and, through the host groups, on all
// ranks.
void DeviceGroup::fail(const Error& error) noexcept {
  if (!watchdog_.end(error)) return;
  order_.wake();
  host_->abort(error.what());  // first, so that peers learn the reason before they miss this rank
  executors_.abort(error.what());
}

// Waits for the enqueued calls first, as peers may need them.
void DeviceGroup::close_after_peers(std::chrono::nanoseconds wait) noexcept {
  const Deadline deadline(wait.count() > 0 ? wait : kCallsTimeout);
  const auto is_idle = [this] {
    return watchdog_.ended() || (watchdog_.idle() && !order_.any_pending());
  };
  while (!is_idle() && look()) {  // polls: the device sends no notification
    if (deadline.expired() && !is_idle())
      fail(GroupBroken("rank " + std::to_string(rank()) +
                           " closed the group, whose calls did not " + "complete within " +
                           std::to_string(deadline.limit_s()) + " s more",
                       {.rank = rank(), .elapsed_s = deadline.elapsed_s()}));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  watchdog_thread_.join();
  if (watchdog_.close())
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
