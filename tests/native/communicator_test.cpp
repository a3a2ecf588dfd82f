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
using namespace std::chrono_literals;
using played::NcclResult;
using played::PlayedDevice;
using played::PlayedNccl;

NcclResult nothing(nccl::NcclApi&, nccl::NcclComm*) { return NcclResult::success; }

const Test kEnqueueing{
    "a call that is aborted while NCCL enqueues it fails", [] {
      PlayedNccl nccl;
      nccl::Communicator communicator(nccl, {}, 0, 2);
      nccl.state = NcclResult::in_progress;
      std::jthread other;
      nccl.on_group_end = [&] {
        other = std::jthread([&] {
          std::this_thread::sleep_for(20ms);  // launch() polls by then
          communicator.abort();
        });
      };
      const std::string text =
          expect_throws<Error>([&] { communicator.launch(nothing, Deadline(60s)); });
      other.join();
      expect_equal(text, std::string("the NCCL communicator was aborted"), "why");
    }};

const Test kState{"the state of an aborted communicator is an error", [] {
                    PlayedNccl nccl;
                    nccl::Communicator communicator(nccl, {}, 0, 2);
                    expect(communicator.state() == NcclResult::success, "before");
                    communicator.abort();
                    const NcclResult state = communicator.state();
                    expect(state != NcclResult::success && state != NcclResult::in_progress,
                           "after");
                    const Error error = communicator.error_of("ncclAllReduce", state);
                    expect(error.kind() == ErrorKind::group_broken, error.what());
                  }};

const Test kRefused{"a communicator that NCCL creates and then refuses is not leaked", [] {
                      PlayedNccl nccl;
                      nccl.init = NcclResult::system_error;
                      (void)expect_throws<Error>([&] { nccl::Communicator(nccl, {}, 0, 2); });
                      expect_equal(nccl.live.load(), 0, "communicators left");
                    }};

// A rank of a group on played devices.
struct Member {
  explicit Member(group::Group& group) : host(&group, [](group::Group*) {}) {}
  void run() {
    group->run({.operation = Operation::all_reduce,
                .dtype = Dtype::float32,
                .input = device.get(),
                .output = device.get(),
                .count = 1});
  }

  std::shared_ptr<group::Group> host;  // not its owner
  std::shared_ptr<PlayedDevice> device = std::make_shared<PlayedDevice>(host->rank());
  std::shared_ptr<PlayedNccl> nccl = std::make_shared<PlayedNccl>();
  std::shared_ptr<group::Collectives> group =
      device_group::make_device_group(host, {.device = device, .nccl = nccl}, 60s, 60s);
};

// The device is reached last by a call: its end is recorded when NCCL has all of it.
const Test kBetween{"a call that ends with an abort of the group fails with its cause", [] {
                      ranks::World world{.size = 2, .transport = "local"};
                      ranks::run_groups(world, [](group::Group& host) {
                        Member member(host);
                        int records = 0;
                        member.device->on_record = [&] {  // the first begins the call
                          if (++records == 2) member.group->abort("enough");
                        };
                        const std::string text = expect_throws<Error>([&] { member.run(); });
                        expect(text.find("enough") != std::string::npos, text);
                      });
                    }};

// Runs `body` in both ranks of a group while NCCL's aborts do not return, as where a stream hangs
// before NCCL's kernel or a graph lives.
void run_with_stuck_aborts(const std::function<void(Member&)>& body) {
  const auto over = std::make_shared<std::latch>(1);
  auto ranks = std::async(std::launch::async, [&] {
    ranks::World world{.size = 2, .transport = "local"};
    ranks::run_groups(world, [&](group::Group& host) {
      Member member(host);
      member.nccl->on_abort = [over] { over->wait(); };
      member.run();
      body(member);
    });
  });
  const bool returned = ranks.wait_for(20s) == std::future_status::ready;
  over->count_down();
  ranks.get();
  expect(returned, "a rank waited for NCCL");
}

const Test kStuck{"an abort that NCCL does not finish delays neither peers nor destruction", [] {
                    run_with_stuck_aborts([](Member& member) {
                      if (member.host->rank() == 0) member.group->abort("enough");
                      const auto peer = [&] { member.host->run({.timeout = 60s}); };
                      const std::string text = expect_throws<Error>(peer);
                      expect(text.find("enough") != std::string::npos, text);
                      member.group.reset();
                    });
                  }};

const Test kUnfinished{"close() waits for NCCL a few seconds", [] {
                         run_with_stuck_aborts([](Member& member) {
                           member.device->through = true;
                           member.group->close();
                           expect_equal(member.nccl->live.load(), 0, "closed");
                         });
                         run_with_stuck_aborts([](Member& member) {
                           member.device->through = true;
                           member.nccl->state = NcclResult::in_progress;
                           member.group->close();
                           member.group.reset();
                         });
                       }};

const Test kGraph{"a communicator in a graph is kept when the group is closed", [] {
                    run_with_stuck_aborts([](Member& member) {
                      member.device->through = true;
                      member.device->captures = true;
                      member.run();
                      member.group->close();
                      member.group.reset();
                      expect_equal(member.nccl->live.load(), 1, "communicators");
                    });
                  }};

}  // namespace
