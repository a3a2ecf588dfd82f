#include "group/device_group.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "group/carrier.h"
#include "group/check.h"
#include "group/pulse.h"
#include "group/watch.h"

namespace pycomm {
namespace {

// How often enqueued calls are looked at; a call that nothing is wrong with does not notice.
constexpr std::chrono::milliseconds kLook{100};

// A call that was started: agreed about on the host group's worker, then enqueued there.
class DeviceWork final : public Work {
 public:
  // `is_over`: whether the device has passed an event of a call, and nothing has given up the call.
  explicit DeviceWork(std::function<bool(const Event&)> is_over) : is_over_(std::move(is_over)) {}

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
    std::shared_ptr<Event> over;
    {
      const std::lock_guard lock(mutex_);
      if (!settled_) return false;
      if (error_ || captured_) return true;
      over = over_;
    }
    try {
      return is_over_(*over);         // without the lock, which fail() takes
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
  std::function<bool(const Event&)> is_over_;
  std::shared_ptr<Work> agreed_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool settled_ = false, captured_ = false;
  std::shared_ptr<Event> over_;
  std::exception_ptr error_;
};

// `source`: told by a receive whom it has agreed with.
Call agreement_about(const Call& call, int* source) {
  Call asked = call;
  asked.agreement = true;
  asked.source = source;
  return asked;
}

// "send(float32, count 10, tag 0, nccl, on CUDA devices) to rank 1"
std::string text_of(const Call& call) {
  Header header = signature_of(agreement_about(call, nullptr), call.algorithm);
  if (is_plan(call.operation)) return describe(header);
  header.operation = static_cast<uint8_t>(call.operation);  // signatures of both ends say send
  const bool sends = call.operation == Operation::send;
  return describe(header) + (sends ? " to rank " : " from rank ") + std::to_string(call.peer);
}

// Of a receive, when the ranks have agreed: from whom.
void learn(Call& call, int source) {
  if (call.operation != Operation::recv) return;
  call.peer = source;
  if (call.source != nullptr) *call.source = source;
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
              std::unique_ptr<Carrier> carrier, std::chrono::nanoseconds timeout)
      : host_(std::move(host)),
        device_(std::move(device)),
        timeout_(timeout),
        carrier_(std::move(carrier)),
        watch_(*host_, *carrier_) {
    pulse_.start(kLook, [this] { return look(); });
  }
  ~DeviceGroup() override { pulse_.join(); }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }
  const std::vector<Member>& members() const override { return host_->members(); }
  const std::vector<int>& ranks() const override { return host_->ranks(); }
  int local_rank() const override { return host_->local_rank(); }
  int local_size() const override { return host_->local_size(); }
  int host_count() const override { return host_->host_count(); }
  const std::vector<int>& hosts() const override { return host_->hosts(); }
  bool encrypted() const override { return host_->encrypted(); }
  bool reproducible() const override { return host_->reproducible(); }

  void run(const Call& given) override;
  std::shared_ptr<Work> start(const Call& given,
                              std::function<void(std::exception_ptr)> then) override;
  void exchange(std::span<const Call>) override {
    throw Unsupported("messages that travel at once are for arrays in host memory");
  }
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
  void hear(std::chrono::nanoseconds limit) override { host_->hear(limit); }
  void abort(const std::string& reason) noexcept override {
    fail(GroupBroken("the group was aborted: " + reason, {.rank = rank()}));
  }

 private:
  static constexpr const char* kHostsOwn =
      "a group on devices is neither split nor made anew: split the group, whose parts make theirs";

  Carried begin(const Call& given);
  std::shared_ptr<Event> mark(void* stream);
  using Failed = std::function<void(std::exception_ptr)>;
  std::shared_ptr<Event> enqueue(const Carried& carried, Event& before, const Deadline& deadline,
                                 Failed failed);
  bool look() noexcept;
  void fail(const Error& error) noexcept;

  std::shared_ptr<Group> host_;
  std::shared_ptr<Device> device_;
  std::chrono::nanoseconds timeout_;
  std::mutex turn_;           // of who is inside run() or start()
  mutable std::mutex mutex_;  // guards the carrier and calls_
  std::unique_ptr<Carrier> carrier_;
  uint64_t calls_ = 0;
  Watch watch_;
  std::mutex ending_;  // guards ended_
  bool ended_ = false;
  Pulse pulse_;  // the last member: its thread ends before what it uses
};

// The moment on the caller's stream behind which a call begins.
std::shared_ptr<Event> DeviceGroup::mark(void* stream) {
  auto event = carrier_->event();
  event->record(stream);
  return event;
}

// What can be refused here alone, without the others, is refused here.
Carried DeviceGroup::begin(const Call& given) {
  if (given.algorithm == Algorithm::shared_memory)
    lacks(given, "the algorithm shared_memory is for arrays in host memory");
  Call call = given;
  call.algorithm = carrier_->algorithm_for(given);
  if (call.timeout.count() == 0) call.timeout = timeout_;
  Call asked = call;
  if (asked.algorithm == Algorithm::nccl || asked.algorithm == Algorithm::staged ||
      !is_plan(asked.operation))
    asked.algorithm = Algorithm::automatic;
  check_call(asked, rank(), size());
  const std::lock_guard lock(mutex_);
  return carrier_->prepare(call);
}

void DeviceGroup::run(const Call& given) {
  const Turn turn(turn_);
  Carried carried = begin(given);
  const Deadline deadline(carried.call.timeout);
  const auto before = mark(given.stream);
  int source = given.peer;
  host_->run(agreement_about(carried.call, &source));
  learn(carried.call, source);
  enqueue(carried, *before, deadline, {})->hold(given.stream);
}

std::shared_ptr<Work> DeviceGroup::start(const Call& given,
                                         std::function<void(std::exception_ptr)> then) {
  const Turn turn(turn_);
  const auto work = std::make_shared<DeviceWork>([weak = weak_from_this()](const Event& over) {
    const auto self = weak.lock();
    return !self || self->watch_.is_over(over);  // with the group end its calls
  });
  Carried carried = begin(given);
  const Deadline deadline(carried.call.timeout);
  const auto before = mark(given.stream);
  const auto source = std::make_shared<int>(given.peer);
  auto enqueued = [self = shared_from_this(), work, carried, before, deadline, source,
                   then = std::move(then)](std::exception_ptr error) mutable {
    std::shared_ptr<Event> over;
    try {
      if (!error) {
        learn(carried.call, *source);
        over = self->enqueue(carried, *before, deadline,
                             [work](std::exception_ptr late) { work->fail(std::move(late)); });
      }
      if (over && carried.call.follower != nullptr) over->hold(carried.call.follower);
    } catch (...) {  // the work tells it
      error = std::current_exception();
    }
    work->settle(std::move(over), error);
    if (then) then(error);
  };
  const Call agreement = agreement_about(carried.call, source.get());
  if (device_->capturing(given.stream)) {  // on this thread, to which a capture may belong
    work->capture();
    host_->run(agreement);
    enqueued(nullptr);
  } else {
    work->follow(host_->start(agreement, enqueued));
  }
  return work;
}

std::shared_ptr<Event> DeviceGroup::enqueue(const Carried& carried, Event& before,
                                            const Deadline& deadline, Failed failed) {
  try {
    const std::lock_guard lock(mutex_);
    ++calls_;
    const bool captured = device_->capturing(carried.call.stream);
    auto over = carrier_->enqueue(carried, before, deadline);
    // What a graph holds is for whoever launches it.
    if (!captured)
      watch_.add(text_of(carried.call),
                 is_plan(carried.call.operation) ? Watch::kEverybody : carried.call.peer, deadline,
                 over, std::move(failed));
    return over;
  } catch (const Error& error) {  // the other ranks have enqueued their parts
    fail(error);
    throw;
  }
}

bool DeviceGroup::look() noexcept {
  try {
    const auto error = watch_.look();
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
  watch_.end(std::make_exception_ptr(Error(error)));
  carrier_->abort(error.what());
  host_->abort(error.what());
}

// When what was enqueued is over, which other ranks may need.
void DeviceGroup::close() noexcept {
  const auto through = [this] {
    const std::lock_guard lock(ending_);
    return ended_ || watch_.idle();
  };
  while (!through() && look())  // nobody tells
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  pulse_.join();
  const std::lock_guard lock(ending_);
  if (!std::exchange(ended_, true)) carrier_->close(Deadline(timeout_));
}

Stats DeviceGroup::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = carrier_->stats();
  stats.calls = calls_;
  return stats;
}

constexpr const char* kAllRanks =
    "the first call with arrays on devices, a send or recv as well, needs all ranks of the group, "
    "each with an array on its device; begin with a collective call on devices, or for torch with "
    "init_process_group(device_id=...): ";

// What a rank tells the others of its parts.
struct Told {
  std::array<char, 28> bus_id;  // and zeros
  bool nccl_shares, has_nccl, nccl_between_hosts;
  uint8_t lanes;
};
static_assert(sizeof(Told) == 32);

// Which the first call with arrays on devices does, whatever the call is.
std::vector<Told> exchange_parts(Group& host, const DeviceParts& parts,
                                 std::chrono::nanoseconds limit) {
  const auto [lanes, nccl_between_hosts] = parts.lines;
  check(lanes >= 1 && lanes <= 255, "a number of lanes that is none");
  Told mine{{},
            parts.nccl_shares,
            parts.nccl != nullptr,
            nccl_between_hosts,
            static_cast<uint8_t>(lanes)};
  const std::string bus_id = parts.device->bus_id();
  std::copy_n(bus_id.begin(), std::min(bus_id.size(), mine.bus_id.size()), mine.bus_id.begin());
  std::vector<Told> all(static_cast<size_t>(host.size()));
  try {
    host.run({.operation = Operation::all_gather,
              .input = &mine,
              .output = all.data(),
              .count = sizeof(Told),
              .timeout = limit});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::timeout) throw;
    throw Timeout(kAllRanks + std::string(error.what()), error.fields());
  }
  return all;
}

// Whether the group goes without NCCL, as that would refuse these ranks: two that it sees on one
// device of a host.
bool goes_through_host(const Group& host, const std::vector<Told>& all) {
  std::set<std::pair<int, decltype(Told::bus_id)>> devices;
  for (size_t rank = 0; rank < all.size(); ++rank)
    devices.emplace(host.hosts()[rank], all[rank].bus_id);
  return devices.size() < all.size() && !std::ranges::all_of(all, &Told::nccl_shares);
}

// Throws Unsupported, on all ranks, where NCCL would send in the clear what has to be encrypted.
void check_encrypted(const Group& host, const Told& first) {
  if (host.encrypted() && host.host_count() > 1 && first.nccl_between_hosts)
    throw Unsupported(
        "encrypt=True: NCCL between hosts does not encrypt; use cuda_internode_transport=\"tcp\" "
        "for "
        "arrays on CUDA devices");
}

// Throws Unsupported where a rank has no NCCL and needs it: one that is alone on its host, where
// NCCL is for the ranks of each, does not.
void check_nccl(const Group& host, const std::vector<Told>& all, const DeviceParts& parts) {
  const auto needs = [&](size_t rank) {
    return all[0].nccl_between_hosts || std::ranges::count(host.hosts(), host.hosts()[rank]) > 1;
  };
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].has_nccl || !needs(rank)) continue;
    if (!parts.nccl) throw Unsupported(parts.why_no_nccl);
    throw Unsupported("rank " + std::to_string(rank) +
                      " has found no NCCL, which arrays on CUDA devices travel by; its error says "
                      "where it has looked");
  }
}

}  // namespace

std::shared_ptr<Group> make_device_group(std::shared_ptr<Group> host, DeviceParts parts,
                                         std::chrono::nanoseconds timeout,
                                         std::chrono::nanoseconds limit) {
  const auto told = exchange_parts(*host, parts, limit);
  std::unique_ptr<Carrier> carrier;
  if (goes_through_host(*host, told)) {
    carrier = carry_through_host(host, parts.device);
  } else {
    check_encrypted(*host, told[0]);
    check_nccl(*host, told, parts);
    const DeviceLines lines{.lanes = told[0].lanes,
                            .nccl_between_hosts = told[0].nccl_between_hosts};
    carrier = carry_by_nccl(host, parts.device, std::move(parts.nccl), lines, timeout);
  }
  return std::make_shared<DeviceGroup>(std::move(host), std::move(parts.device), std::move(carrier),
                                       timeout);
}

}  // namespace pycomm
