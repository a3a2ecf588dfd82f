// How many functions are on the stack when an all_reduce over TCP sends its first bytes, and when
// one of device arrays calls NCCL. The optimizer removes some; `python tests/native/build.py
// unoptimized frames` builds without it.
#include <execinfo.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "device_group/device_group.h"
#include "harness.h"
#include "played_devices.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;

constexpr int kMostOfDevices = 14;  // from DeviceGroup::run() to NcclApi, both included
constexpr int kMost = 11;  // from HostGroup::run() to sendmsg(), both included; 10 with g++ 12

thread_local int depth_of_body = 0, depth_of_send = 0;

[[gnu::noinline]] int depth() {
  std::array<void*, 128> frames{};
  return ::backtrace(frames.data(), static_cast<int>(frames.size()));
}

}  // namespace

// Replaces the C library's function in this program.
extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  if (depth_of_body > 0 && depth_of_send == 0) depth_of_send = depth();
  return ::syscall(SYS_sendmsg, socket, message, flags);
}

namespace {

const Test kFrames("an all_reduce passes few functions before it sends", [] {
  ranks::run_groups(2, "tcp", [](group::Group& group) {
    float x = 1;
    depth_of_body = depth();
    group.run(ranks::sum_in_place({&x, 1}, Algorithm::direct));
    const int frames = depth_of_send - depth_of_body;
    depth_of_body = 0;
    if (group.rank() == 0) std::printf("  frames: %d\n", frames);
    expect(depth_of_send > 0, "nothing was sent");
    expect(frames > 0 && frames <= kMost, std::to_string(frames) + " functions are on the stack");
  });
});

class CountingNccl final : public played::PlayedNccl {
 public:
  int depth_of_call = 0;

  played::NcclResult all_reduce(nccl::NcclData, nccl::NcclOp, nccl::NcclQueue) override {
    return depth_of_call = depth(), state.load();
  }
};

const Test kDeviceFrames("an all_reduce of device arrays passes few functions before NCCL", [] {
  ranks::run_groups(2, "local", [](group::Group& host) {
    const auto nccl = std::make_shared<CountingNccl>();
    const auto group = device_group::make_device_group(
        {&host, [](group::Group*) {}},
        {.device = std::make_shared<played::PlayedDevice>(host.rank()), .nccl = nccl}, 60s);
    float x = 1;
    const int depth_of_body = depth();
    group->run(ranks::sum_in_place({&x, 1}));
    group->abort("the test is over");
    const int frames = nccl->depth_of_call - depth_of_body;
    if (host.rank() == 0) std::printf("  frames of devices: %d\n", frames);
    expect(frames > 0 && frames <= kMostOfDevices,
           std::to_string(frames) + " functions are on the stack");
  });
});

}  // namespace
