// NCCL communicators that end while they are used, and device groups over them. The device and NCCL
// are played.
#include "nccl/communicator.h"

#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <string>
#include <thread>

#include "device_group/device_group.h"
#include "harness.h"
#include "played_devices.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace std::chrono_literals;
using played::NcclResult;
using played::PlayedDevice;
using played::PlayedNccl;

NcclResult nothing(nccl::NcclApi&, nccl::NcclComm*) { return NcclResult::success; }

// A communicator that has met its peers.
struct Met {
  Met() { communicator.connect(Deadline(60s)); }
  PlayedNccl nccl;
  nccl::Communicator communicator{nccl, {}, 0, 2};
};

const Test kEnqueueing("an abort ends the wait of a call and then the child", [] {
  Met met;
  std::latch called(1), parent_aborted(1);
  std::atomic<bool> answered = false, returned = false, too_early = false;
  met.nccl.on_group_end = [&] {
    called.count_down();
    parent_aborted.wait();  // as NCCL waits for a peer to connect
    std::this_thread::yield();
    returned = true;
  };
  met.nccl.on_abort = [&](bool of_parent) {
    if (of_parent) return parent_aborted.count_down();
    too_early = !returned;
  };
  std::jthread other([&] {
    called.wait();
    answered = met.communicator.state() == NcclResult::success;
    met.communicator.abort();
  });
  const std::string text = expect_throws<Error>([&] { met.communicator.launch(nothing); });
  other.join();
  expect_equal(text, std::string("the NCCL communicator was aborted"), "why");
  expect(answered, "the state during a call");
  expect(!too_early, "NCCL freed a communicator that a call uses");
  expect_equal(met.nccl.live.load(), 0, "communicators left");
});

const Test kState("the state of an aborted communicator is an error", [] {
  Met met;
  expect(met.communicator.state() == NcclResult::success, "before");
  met.communicator.abort();
  const NcclResult state = met.communicator.state();
  expect(state != NcclResult::success && state != NcclResult::in_progress, "after");
  const Error error = met.communicator.error_of("ncclAllReduce", state);
  expect(error.kind() == ErrorKind::group_broken, error.what());
});

const Test kRefused("a communicator that NCCL creates and then refuses is not leaked", [] {
  PlayedNccl nccl;
  nccl.init = NcclResult::system_error;
  (void)expect_throws<Error>([&] { nccl::Communicator(nccl, {}, 0, 2); });
  expect_equal(nccl.live.load(), 0, "communicators left");
});

const Test kUnsplit("a communicator that NCCL does not split is not leaked", [] {
  PlayedNccl nccl;
  nccl.split = NcclResult::system_error;
  const std::string text =
      expect_throws<Error>([&] { nccl::Communicator(nccl, {}, 0, 2).connect(Deadline(60s)); });
  expect(text.starts_with("ncclCommSplit: "), text);
  expect_equal(nccl.live.load(), 0, "communicators left");
});

// A rank of a group on played devices.
struct Member {
  explicit Member(Group& group) : host(&group, [](Group*) {}) {}
  void run(std::chrono::nanoseconds timeout = 60s) {
    group->run({.operation = Operation::all_reduce,
                .dtype = Dtype::float32,
                .input = device.get(),
                .output = device.get(),
                .count = 1,
                .timeout = timeout});
  }

  std::shared_ptr<Group> host;  // not its owner
  std::shared_ptr<PlayedDevice> device = std::make_shared<PlayedDevice>(host->rank());
  std::shared_ptr<PlayedNccl> nccl = std::make_shared<PlayedNccl>();
  std::shared_ptr<Collectives> group =
      device_group::make_device_group(host, {.device = device, .nccl = nccl}, 60s);
};

// The device is reached last by a call: its end is recorded when NCCL has all of it.
const Test kBetween("a call that ends with an abort of the group fails with its cause", [] {
  ranks::World world{.size = 2, .transport = "local"};
  ranks::run_groups(world, [](Group& host) {
    Member member(host);
    int records = 0;
    member.device->on_record = [&] {  // the first begins the call
      if (++records == 2) member.group->abort("enough");
    };
    const std::string text = expect_throws<Error>([&] { member.run(); });
    expect_says(text, "enough");
  });
});

// A rank whose peer dies as NCCL connects to it, or stops.
const Test kLimit("a call that NCCL does not enqueue ends at its limit", [] {
  ranks::World world{.size = 2, .transport = "local"};
  ranks::run_groups(world, [](Group& host) {
    Member member(host);
    std::latch aborted(1);
    member.nccl->on_group_end = [&] { aborted.wait(); };
    member.nccl->on_abort = [&](bool of_parent) {
      if (of_parent) aborted.count_down();
    };
    const std::string text = expect_throws<Error>([&] { member.run(300ms); });
    expect_says(text, "could not be enqueued within 0.3");
  });
});

const Test kBlocks("calls of all channels fit on the device together", [] {
  for (const auto& [channels, processors, wanted] :
       {std::tuple(1, 132, 0), {8, 132, 16}, {8, 4, 1}}) {
    ranks::World world{.size = 2, .transport = "local"};
    ranks::run_groups(world, [&](Group& host) {
      const auto device = std::make_shared<PlayedDevice>(host.rank());
      const auto nccl = std::make_shared<PlayedNccl>();
      device->processors = processors;
      const std::shared_ptr<Group> here(&host, [](Group*) {});
      device_group::make_device_group(
          here, {.device = device, .nccl = nccl, .options = {.channels = channels}}, 60s)
          ->form(60s);
      expect_equal(nccl->max_ctas.load(), wanted, "thread blocks");
      expect_equal(nccl->childs_max_ctas.load(), wanted, "of the child");
    });
  }
});

// Runs `body` in both ranks of a group while NCCL's aborts do not return, as where a stream hangs
// before NCCL's kernel or a graph lives.
void run_with_stuck_aborts(
    const std::function<void(Member&, const std::function<void()>& stuck)>& body) {
  const auto over = std::make_shared<std::latch>(1);
  auto ranks = std::async(std::launch::async, [&] {
    ranks::World world{.size = 2, .transport = "local"};
    ranks::run_groups(world, [&](Group& host) {
      Member member(host);
      member.nccl->on_abort = [over](bool) { over->wait(); };
      member.run();
      body(member, [over] { over->wait(); });
    });
  });
  const bool returned = ranks.wait_for(20s) == std::future_status::ready;
  over->count_down();
  ranks.get();
  expect(returned, "a rank waited for NCCL");
}

const Test kStuck("an abort that NCCL does not finish delays neither peers nor destruction", [] {
  run_with_stuck_aborts([](Member& member, const auto&) {
    if (member.host->rank() == 0) member.group->abort("enough");
    const auto peer = [&] { member.host->run({.timeout = 60s}); };
    const std::string text = expect_throws<Error>(peer);
    expect_says(text, "enough");
    member.group.reset();
  });
});

const Test kUnfinished("close() waits for NCCL a few seconds", [] {
  run_with_stuck_aborts([](Member& member, const auto&) {
    member.device->through = true;
    member.group->close();
    expect_equal(member.nccl->live.load(), 0, "communicators");
  });
  run_with_stuck_aborts([](Member& member, const auto& stuck) {
    member.device->through = true;
    member.nccl->on_destroy = stuck;
    member.group->close();
    member.group.reset();
  });
});

const Test kGraph("a communicator in a graph is kept when the group is closed", [] {
  run_with_stuck_aborts([](Member& member, const auto&) {
    member.device->through = true;
    member.device->captures = true;
    member.run();
    member.group->close();
    member.group.reset();
    expect_equal(member.nccl->live.load(), 2, "communicators");
  });
});

}  // namespace
