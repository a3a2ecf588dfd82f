#include "group/device_group.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "device/stream_engine.h"
#include "engine/engine.h"
#include "group/check.h"
#include "group/pulse.h"
#include "group/watch.h"

namespace pycomm {
namespace {

constexpr size_t kMaxPlans = 256;
// How often enqueued calls are looked at; a call that nothing is wrong with does not notice.
constexpr std::chrono::milliseconds kLook{100};

[[noreturn]] void lacks(const Call& call, const std::string& what) {
  const std::string op(name_of(call.operation));
  throw Unsupported(op + " of CUDA arrays: " + what, {.op = op});
}

// A call that was started: agreed about on the host group's worker, then enqueued there.
class DeviceWork final : public Work {
 public:
  void capture() { captured_ = true; }
  bool captured() const override { return captured_; }
  // The agreement; what follows it calls settle().
  void follow(std::shared_ptr<Work> agreed) { agreed_ = std::move(agreed); }
  void settle(std::shared_ptr<Event> over, std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      over_ = std::move(over);
      if (error) error_ = std::move(error);  // fail() may have been first
      settled_ = true;
    }
    changed_.notify_all();
  }
  // Enqueued, and given up before it was over.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  // In a graph it is over when it is enqueued; on a device that no longer answers, too.
  bool done() const override {
    const std::lock_guard lock(mutex_);
    try {
      return settled_ && (error_ || captured_ || over_->passed());
    } catch (const InternalError&) {  // whoever uses the device next hears of it
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
    changed_.wait(lock, [this] { return settled_; });  // at once: only the enqueueing is left
    if (error_) std::rethrow_exception(error_);
  }
  void precede(void* stream) override {
    const std::lock_guard lock(mutex_);
    check(settled_ && over_, "a call is waited for before it is followed");
    over_->hold(stream);
  }

 private:
  std::shared_ptr<Work> agreed_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool settled_ = false, captured_ = false;
  std::shared_ptr<Event> over_;
  std::exception_ptr error_;
};

Call agreement_about(const Call& call) {
  Call asked = call;
  asked.agreement = true;
  return asked;
}

// One thread at a time inside a group.
class Turn {
 public:
  explicit Turn(std::mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (!lock_)
      throw InvalidArgument(
          "another thread is inside a call of this group; use group.split() for each thread");
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

class DeviceGroup final : public Group, public std::enable_shared_from_this<DeviceGroup> {
 public:
  DeviceGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
              std::shared_ptr<NcclApi> nccl, std::chrono::nanoseconds timeout)
      : host_(std::move(host)),
        nccl_(std::move(nccl)),
        device_(std::move(device)),
        timeout_(timeout),
        engine_(nccl_, device_, host_->rank(), host_->size()) {}
  ~DeviceGroup() override { pulse_.join(); }

  void meet();

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }
  const std::vector<Member>& members() const override { return host_->members(); }
  const std::vector<int>& ranks() const override { return host_->ranks(); }
  int local_rank() const override { return host_->local_rank(); }
  int local_size() const override { return host_->local_size(); }
  int host_count() const override { return host_->host_count(); }
  const std::vector<int>& hosts() const override { return host_->hosts(); }
  bool reproducible() const override { return host_->reproducible(); }

  void run(const Call& given) override;
  std::shared_ptr<Work> start(const Call& given,
                              std::function<void(std::exception_ptr)> then) override;
  std::shared_ptr<Group> split(int, int) override { throw Unsupported(kHostsOwn); }
  std::shared_ptr<Group> regroup(Store&, const std::string&, const std::vector<int>&,
                                 std::chrono::nanoseconds) override {
    throw Unsupported(kHostsOwn);
  }
  std::vector<int> lost() const override { return host_->lost(); }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  Stats stats() const override;
  Status status() const override { return host_->status(); }
  void set_timeout(std::chrono::nanoseconds timeout) override {
    if (timeout.count() <= 0) throw InvalidArgument("a timeout must be longer than nothing");
    timeout_ = timeout;
  }
  void close() noexcept override;
  void abort(const std::string& reason) noexcept override {
    fail(GroupBroken("the group was aborted: " + reason, {.rank = rank()}));
  }

 private:
  static constexpr const char* kHostsOwn =
      "a group on devices is neither split nor made anew: split the group, whose parts make theirs";

  // A call as the engine takes it.
  struct Planned {
    Call call;  // with its algorithm and its limit
    std::shared_ptr<const Stages> stages;
    StreamJob job;
  };
  std::shared_ptr<Planned> planned(const Call& given);
  Algorithm algorithm_for(const Call& call) const;
  void check_device_call(const Call& call) const;
  std::shared_ptr<const Stages> stages_of(const Call& call);
  std::shared_ptr<Planned> begin(const Call& given);
  std::shared_ptr<Event> mark(void* stream);
  using Failed = std::function<void(std::exception_ptr)>;
  std::shared_ptr<Event> enqueue(const Planned& planned, Event& before, const Deadline& deadline,
                                 Failed failed);
  bool look() noexcept;
  void fail(const Error& error) noexcept;

  std::shared_ptr<Group> host_;
  std::shared_ptr<NcclApi> nccl_;
  std::shared_ptr<Device> device_;
  std::chrono::nanoseconds timeout_;
  std::mutex turn_;           // of who is inside run() or start()
  mutable std::mutex mutex_;  // guards the engine and plans_
  StreamEngine engine_;
  std::map<std::tuple<Operation, Algorithm, size_t, int>, std::shared_ptr<const Stages>> plans_;
  uint64_t calls_ = 0;
  std::unique_ptr<Watch> watch_;
  std::mutex ending_;  // guards ended_
  bool ended_ = false;
  Pulse pulse_;  // the last member: its thread ends before what it uses
};

// Rank 0 names the communicator. Those that cannot make it, and those whom they keep waiting, end.
void DeviceGroup::meet() {
  const Deadline deadline(timeout_);
  NcclId id{};
  if (rank() == 0 && size() > 1) {
    const NcclResult made = nccl_->get_unique_id(id);
    if (made != NcclResult::success)
      throw InternalError(nccl_error_text(*nccl_, "ncclGetUniqueId", made, nullptr));
  }
  host_->run({.operation = Operation::broadcast,
              .output = id.bytes.data(),
              .count = id.bytes.size(),
              .timeout = timeout_});
  try {
    engine_.meet(id, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::timeout) throw;
    throw Unsupported(std::string(error.what()) + "; each rank needs a device of its own",
                      error.fields());
  }
  watch_ = std::make_unique<Watch>(*host_, engine_.communicator());
  pulse_.start(kLook, [this] { return look(); });
}

void DeviceGroup::check_device_call(const Call& call) const {
  Call asked = call;
  if (!is_plan(call.operation)) lacks(call, "messages are for arrays in host memory");
  if (call.algorithm == Algorithm::shared_memory)
    lacks(call, "the algorithm shared_memory is for arrays in host memory");
  if (call.algorithm == Algorithm::nccl) {
    if (!call.counts.empty() || !has_nccl(call.operation, call.dtype, call.op))
      lacks(call,
            "NCCL has none of its own for this dtype, op or list of counts; leave the "
            "algorithm out, or name one of ours");
    asked.algorithm = Algorithm::automatic;
  }
  check_call(asked, rank(), size());
}

// NCCL's own where there is one, as it knows how its GPUs are connected; but for sums whose order
// has to be ours.
Algorithm DeviceGroup::algorithm_for(const Call& call) const {
  if (call.algorithm == Algorithm::nccl && size() == 1) return Algorithm::direct;
  if (call.algorithm != Algorithm::automatic) return call.algorithm;
  const bool ordered = reduces(call.operation) && host_->reproducible();
  if (size() > 1 && call.counts.empty() && !ordered &&
      has_nccl(call.operation, call.dtype, call.op))
    return Algorithm::nccl;
  return choose({.operation = call.operation,
                 .dtype = call.dtype,
                 .op = call.op,
                 .size = size(),
                 .count = count_to_choose_by(call),
                 .reproducible = host_->reproducible(),
                 .ragged = !call.counts.empty(),
                 .hosts = host_count()});
}

// Null for NCCL's own.
std::shared_ptr<const Stages> DeviceGroup::stages_of(const Call& call) {
  if (call.algorithm == Algorithm::nccl) return nullptr;
  const Place at{.rank = rank(),
                 .size = size(),
                 .count = call.count,
                 .root = is_rooted(call.operation) ? call.peer : 0,
                 .counts = call.counts,
                 .hosts = hosts()};
  const auto made = [&] {
    const Plan plan = make_plan(call.algorithm, call.operation, at);
    return std::make_shared<const Stages>(make_stages(plan, at.rank));
  };
  if (!call.counts.empty()) return made();  // lists change from call to call
  const auto key = std::tuple(call.operation, call.algorithm, call.count, at.root);
  const std::lock_guard lock(mutex_);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  return plans_.emplace(key, made()).first->second;
}

std::shared_ptr<DeviceGroup::Planned> DeviceGroup::planned(const Call& given) {
  check_device_call(given);
  Call call = given;
  call.algorithm = algorithm_for(given);
  if (call.timeout.count() == 0) call.timeout = timeout_;
  auto stages = stages_of(call);
  const StreamJob job{.stages = stages.get(),
                      .operation = call.operation,
                      .dtype = call.dtype,
                      .op = call.op,
                      .input = static_cast<const std::byte*>(call.input),
                      .output = static_cast<std::byte*>(call.output),
                      .count = call.count,
                      .root = call.peer};
  return std::make_shared<Planned>(Planned{std::move(call), std::move(stages), job});
}

// The moment on the caller's stream behind which a call begins.
std::shared_ptr<Event> DeviceGroup::mark(void* stream) {
  auto event = engine_.event();
  event->record(stream);
  return event;
}

// What can be refused here alone, without the others, is refused here.
std::shared_ptr<DeviceGroup::Planned> DeviceGroup::begin(const Call& given) {
  auto call = planned(given);
  const std::lock_guard lock(mutex_);
  engine_.prepare(call->job, given.stream);
  return call;
}

void DeviceGroup::run(const Call& given) {
  const Turn turn(turn_);
  const auto call = begin(given);
  const Deadline deadline(call->call.timeout);
  const auto before = mark(given.stream);
  host_->run(agreement_about(call->call));
  enqueue(*call, *before, deadline, {})->hold(given.stream);
}

std::shared_ptr<Work> DeviceGroup::start(const Call& given,
                                         std::function<void(std::exception_ptr)> then) {
  const Turn turn(turn_);
  const auto work = std::make_shared<DeviceWork>();
  const auto call = begin(given);
  const Deadline deadline(call->call.timeout);
  const auto before = mark(given.stream);
  const auto enqueued = [self = shared_from_this(), work, call, before, deadline,
                         then = std::move(then)](std::exception_ptr error) {
    std::shared_ptr<Event> over;
    try {
      if (!error)
        over = self->enqueue(*call, *before, deadline,
                             [work](std::exception_ptr late) { work->fail(std::move(late)); });
      if (over && call->call.follower != nullptr) over->hold(call->call.follower);
    } catch (...) {  // the work tells it
      error = std::current_exception();
    }
    work->settle(std::move(over), error);
    if (then) then(error);
  };
  const Call agreement = agreement_about(call->call);
  if (device_->capturing(given.stream)) {  // on this thread, to which a capture may belong
    work->capture();
    host_->run(agreement);
    enqueued(nullptr);
  } else {
    work->follow(host_->start(agreement, enqueued));
  }
  return work;
}

std::shared_ptr<Event> DeviceGroup::enqueue(const Planned& planned, Event& before,
                                            const Deadline& deadline, Failed failed) {
  try {
    const std::lock_guard lock(mutex_);
    ++calls_;
    const bool captured = device_->capturing(planned.call.stream);
    auto over = engine_.enqueue(planned.job, before, deadline);
    // What a graph holds is for whoever launches it.
    if (!captured)
      watch_->add(describe(signature_of(agreement_about(planned.call), planned.call.algorithm)),
                  deadline, over, std::move(failed));
    return over;
  } catch (const Error& error) {  // the other ranks have enqueued their parts
    fail(error);
    throw;
  }
}

bool DeviceGroup::look() noexcept {
  try {
    const auto error = watch_->look();
    if (error) fail(*error);
    const std::lock_guard lock(ending_);
    return !ended_;
  } catch (const std::exception& error) {  // CUDA's, as after a kernel that went astray
    fail(InternalError(error.what(), {.rank = rank()}));
    return false;
  }
}

// From any thread: what is under way ends on the device, here and, as the host groups tell each
// other, everywhere.
void DeviceGroup::fail(const Error& error) noexcept {
  {
    const std::lock_guard lock(ending_);
    if (std::exchange(ended_, true)) return;
  }
  watch_->end(std::make_exception_ptr(Error(error)));
  if (engine_.communicator() != nullptr) engine_.communicator()->abort();
  host_->abort(error.what());
}

// When what was enqueued is over, which other ranks may need.
void DeviceGroup::close() noexcept {
  const auto through = [this] {
    const std::lock_guard lock(ending_);
    return ended_ || watch_->idle();
  };
  while (!through() && look())  // nobody tells
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  pulse_.join();
  const std::lock_guard lock(ending_);
  if (std::exchange(ended_, true) || engine_.communicator() == nullptr) return;
  engine_.communicator()->close(Deadline(timeout_));
  engine_.communicator()->abort();
}

Stats DeviceGroup::stats() const {
  const std::lock_guard lock(mutex_);
  const StreamTraffic& traffic = engine_.traffic();
  return {.calls = calls_, .frames_sent = traffic.groups, .bytes_sent = traffic.bytes_sent};
}

}  // namespace

std::shared_ptr<Group> make_device_group(std::shared_ptr<Group> host,
                                         std::shared_ptr<Device> device,
                                         std::shared_ptr<NcclApi> nccl,
                                         std::chrono::nanoseconds timeout) {
  auto group =
      std::make_shared<DeviceGroup>(std::move(host), std::move(device), std::move(nccl), timeout);
  group->meet();
  return group;
}

}  // namespace pycomm
