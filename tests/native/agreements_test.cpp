// Calls of a device group that are enqueued before the ranks agree about them: what they wait for
// on the device, how many there are, and a mismatch. Devices and NCCL are simulated.
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "device_group/device_group.h"
#include "device_group/launch_order.h"
#include "harness.h"
#include "played_devices.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;
using namespace std::chrono_literals;
using played::PlayedDevice;
using played::PlayedNccl;

constexpr auto kLong = 60s * kSlowdown;

// Its streams reach every command at once, and continue after a gate when it is open.
class GatedDevice final : public PlayedDevice {
 public:
  using PlayedDevice::PlayedDevice;

  void* allocate_host(size_t bytes) override { return std::calloc(1, bytes); }
  void release_host(void* memory) noexcept override { std::free(memory); }
  void wait_until(void*, const uint32_t* at, uint32_t value) override {
    const std::lock_guard lock(mutex_);
    gates_.emplace_back(at, value);
  }
  bool passed(void*) override { return open() == made(); }

  size_t made() const {
    const std::lock_guard lock(mutex_);
    return gates_.size();
  }
  size_t open() const {
    const std::lock_guard lock(mutex_);
    size_t count = 0;
    for (const auto& [at, value] : gates_) {
      std::atomic_ref<const uint32_t> word(*at);
      count += static_cast<int32_t>(word.load(std::memory_order_acquire) - value) >= 0;
    }
    return count;
  }
  // Whether all gates open that were made by now: none, if a call failed before it was enqueued.
  bool open_in_time() const { return open_in_time(made()); }
  bool open_in_time(size_t count) const {
    for (const Deadline limit(kLong); open() < count; std::this_thread::yield())
      if (limit.expired()) return false;
    return true;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<const uint32_t*, uint32_t>> gates_;
};

// A rank's device group. The group of `host` outlives it.
struct Rank {
  explicit Rank(Group& host)
      : host_(&host, [](Group*) {}),
        group(device_group::make_device_group(
            host_, {.device = device, .nccl = nccl, .options = {.agree_after = true}}, kLong)) {}
  std::shared_ptr<Group> host_;
  std::shared_ptr<GatedDevice> device = std::make_shared<GatedDevice>(host_->rank());
  std::shared_ptr<PlayedNccl> nccl = std::make_shared<PlayedNccl>();
  std::shared_ptr<Collectives> group;
  float x = 0;

  Call all_reduce(ReduceOp op = ReduceOp::sum) {
    Call call = sum_in_place({&x, 1});
    call.op = op;
    return call;
  }
  // From rank 0 to rank 1.
  Call message() {
    const bool sends = host_->rank() == 0;
    return {.operation = sends ? Operation::send : Operation::recv,
            .dtype = Dtype::float32,
            .input = sends ? &x : nullptr,
            .output = sends ? nullptr : &x,
            .count = 1,
            .peer = sends ? 1 : 0};
  }
  std::shared_ptr<Work> start(ReduceOp op = ReduceOp::sum) { return group->start(all_reduce(op)); }
};

std::unique_ptr<CountDown> let_rank_0_call_first(const Group& host, std::latch& made) {
  if (host.rank() == 0) return std::unique_ptr<CountDown>(new CountDown{made});
  made.wait();
  return nullptr;
}

const Test kAhead("a repeated call is enqueued at once and waits on the device", [] {
  std::latch made(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    expect_equal(r.device->made(), size_t{0}, "the first call agrees before");
    {
      const auto tell = let_rank_0_call_first(host, made);
      for (int call = 0; call < 4; ++call) r.group->run(r.all_reduce());
      expect_equal(r.device->made(), size_t{4}, "gates");
      if (host.rank() == 0) expect_equal(r.device->open(), size_t{0}, "open");
    }
    expect(r.device->open_in_time(4), "the agreements open all gates");
    r.group->close();
  });
});

const Test kMost("a limited number of calls is ahead, and the others follow", [] {
  constexpr size_t kMost = device_group::LaunchOrder::kMostPending;
  std::latch made(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    std::vector<std::shared_ptr<Work>> works;
    {
      const auto tell = let_rank_0_call_first(host, made);
      for (size_t call = 0; call < kMost + 3; ++call) works.push_back(r.start());
      if (host.rank() == 0) {
        expect_equal(r.device->made(), kMost, "gates");
        works[kMost - 1]->wait();
        (void)expect_throws<Timeout>([&] { works[kMost]->wait(1ms); });
      }
    }
    for (const auto& work : works) work->wait();
    r.group->close();
  });
});

// After a first call rank 0 starts further ones, so many of them with a gate, before rank 1 does.
void start_ahead(size_t gates,
                 const std::function<std::vector<std::shared_ptr<Work>>(Rank&)>& start) {
  std::latch made(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    std::vector<std::shared_ptr<Work>> works;
    {
      const auto tell = let_rank_0_call_first(host, made);
      works = start(r);
      if (host.rank() == 0) expect_equal(r.device->made(), gates, "gates");
    }
    for (const auto& work : works) work->wait();
    r.group->close();
  });
}

const Test kBehind("a call behind one that agrees before agrees before, too", [] {
  start_ahead(1, [](Rank& r) { return std::vector{r.start(), r.start(ReduceOp::max), r.start()}; });
});

const Test kMessages("a call behind messages agrees before, too", [] {
  for (const bool batch : {false, true})
    start_ahead(0, [&](Rank& r) {  // a gate would be that of a call that overtook the message
      const auto message = batch ? r.group->start_messages(std::array{r.message()}, nullptr)
                                 : r.group->start(r.message());
      return std::vector{message, r.start()};
    });
});

const Test kMismatch("a mismatch is known when the device continues", [] {
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) r.group->run(r.all_reduce(op));
    const auto work = r.start(host.rank() == 0 ? ReduceOp::sum : ReduceOp::max);
    expect(r.device->open_in_time(), "the device waits permanently");
    ending_of([&] { work->wait(); }).check(ErrorKind::mismatch, {"arrays may have changed"});
    expect(work->done(), "done");
    for (const ErrorKind kind : {ErrorKind::mismatch, ErrorKind::group_broken}) {
      ending_of([&] { r.group->run(r.all_reduce()); }).check(kind);
    }
  });
});

// NCCL on rank 0 fails, as rank 1 ended its communicators before rank 0 knows why.
void fail_nccl(Rank& r, std::function<void()> then) {
  r.nccl->state = played::NcclResult::remote_error;
  r.nccl->on_group_end = std::move(then);
}

const Test kCause("a mismatch is reported although the communicator failed before it is known", [] {
  std::latch made(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) r.group->run(r.all_reduce(op));
    if (host.rank() == 1) {
      made.wait();
      // Longer than rank 0 waits for the reason of an abort.
      std::this_thread::sleep_for(1500ms);
      const auto work = r.start(ReduceOp::max);
      expect(r.device->open_in_time(), "the device waits permanently");
      return;
    }
    fail_nccl(r, [&] { made.count_down(); });
    ending_of([&] {
      r.group->run(r.all_reduce(ReduceOp::sum));
    }).check(ErrorKind::mismatch, {"arrays may have changed"});
  });
});

const Test kReason("the reason of an abort is reported if the communicator failed", [] {
  std::latch agreed(1), over(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    if (host.rank() == 1) {
      r.group->run(r.all_reduce(ReduceOp::max));
      agreed.wait();
      r.group->abort("enough");
      return over.count_down();
    }
    fail_nccl(r, [&] {
      agreed.count_down();
      over.wait();
    });
    ending_of([&] {
      r.group->run(r.all_reduce(ReduceOp::max));
    }).check(ErrorKind::group_broken, {"enough", "all_reduce"});
  });
});

const Test kGroups("a call behind a call of another group agrees before", [] {
  std::latch made(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    const auto part = host.split(0, host.rank());
    Rank other(*part);
    for (Rank* const one : {&r, &other}) one->group->run(one->all_reduce());
    std::shared_ptr<Work> first, second;
    {
      const auto tell = let_rank_0_call_first(host, made);
      first = other.start(ReduceOp::max);
      second = r.start();
      if (host.rank() == 0)
        expect_equal(r.device->made(), size_t{0}, "it overtook the other group");
    }
    for (const auto& work : {first, second}) work->wait();
    for (Rank* const one : {&r, &other}) one->group->close();
    part->close();
  });
});

const Test kBroken("a group is broken before its calls report why", [] {
  std::latch over(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    expect(!r.group->broken(), "a group that works is broken");
    if (host.rank() == 1) return over.wait();
    const CountDown tell{over};
    std::latch reported(1);  // until then host.abort() waits for the worker
    (void)host.start_together([&] { reported.wait(); }, {});
    const auto work = r.start();
    const std::jthread aborting([&] { r.group->abort("enough"); });
    const CountDown told{reported};
    for (const Deadline limit(kLong); !work->error(); std::this_thread::yield())
      expect(!limit.expired(), "the call reports no error");
    expect(r.group->broken(), "a call failed, and the group is not broken");
  });
});

const Test kAbort("an abort opens the gates, also of later calls", [] {
  std::latch over(1);
  run_groups(2, "local", [&](Group& host) {
    Rank r(host);
    r.group->run(r.all_reduce());
    if (host.rank() == 1) return over.wait();
    const CountDown tell{over};
    const auto work = r.start();
    expect_equal(r.device->open(), size_t{0}, "open");
    r.group->abort("enough");
    expect(r.device->open_in_time(1), "the device waits permanently");
    ending_of([&] { work->wait(); }).check(ErrorKind::group_broken, {"enough"});
  });
});

}  // namespace
