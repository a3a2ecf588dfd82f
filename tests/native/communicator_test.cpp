// NCCL communicators that end while they are used, and device groups over them. The device and NCCL
// are played.
#include "nccl/communicator.h"

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

// The device is reached last by a call: its end is recorded when NCCL has all of it.
const Test kBetween{"a call that ends with an abort of the group fails with its cause", [] {
                      ranks::World world{.size = 2, .transport = "local"};
                      ranks::run_groups(world, [](group::Group& host) {
                        const std::shared_ptr<group::Group> shared(&host, [](group::Group*) {});
                        const auto device = std::make_shared<PlayedDevice>(host.rank());
                        const auto group = device_group::make_device_group(
                            shared, {.device = device, .nccl = std::make_shared<PlayedNccl>()}, 30s,
                            30s);
                        group::Call call{.operation = Operation::all_reduce,
                                         .dtype = Dtype::float32,
                                         .input = device.get(),
                                         .output = device.get(),
                                         .count = 1};
                        int records = 0;
                        device->on_record = [&] {  // the first begins the call
                          if (++records == 2) group->abort("enough");
                        };
                        const std::string text = expect_throws<Error>([&] { group->run(call); });
                        expect(text.find("enough") != std::string::npos, text);
                      });
                    }};

}  // namespace
