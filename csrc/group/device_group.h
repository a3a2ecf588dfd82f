// Groups of ranks whose arrays lie on CUDA devices: by NCCL where each rank has one of its own;
// where ranks share one, which NCCL refuses, through host memory. NCCL may be left to the ranks of
// each host, whose messages to other hosts then go by our own transports.
//
// Such a group stands on one in host memory: by that the ranks agree about every call before
// anything of it is enqueued, with the same checks, limits and errors, and hear of each other's
// deaths. Then the call runs on a stream of the group's own, between events of the caller's.
//
//   host     agree: all ranks have come, and to the same call
//   caller   ... x is ready | event                      event | what uses the result ...
//   group                        wait | NCCL or a plan |
//
// Nothing waits for the device, but for a thread that looks now and then whether calls that were
// enqueued are over: one that is not within its limit, an error that NCCL reports and a rank that
// is lost end the communicator and the group, and later calls repeat the cause. Called by
// bindings/core_device.cpp.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "device/device.h"
#include "group/group.h"
#include "nccl/nccl.h"

namespace pycomm {

// How arrays travel, on rank 0's word.
struct DeviceOptions {
  int lanes = 1;                   // of rings over large arrays; at most 255
  bool nccl_between_hosts = true;  // else TCP, through host memory
};

// What a rank brings.
struct DeviceResources {
  std::shared_ptr<Device> device;
  std::shared_ptr<NcclApi> nccl;  // null: none was found
  std::string why_no_nccl{};      // then
  bool nccl_shares = false;       // NCCL was told, on this rank, to let ranks share a device
  DeviceOptions options{};
};

// Collective over `host`, whose calls and this group's make one order. Until `limit` all ranks have
// to come; `timeout` is the limit of NCCL's forming, and of calls that name none: to agree, and to
// be over on the device. Splits and
// memory are the host group's. Throws what calls of `host` throw; Unsupported where a device is no
// good for NCCL, and on every rank where one that needs NCCL has none; Timeout where ranks do not
// come.
std::shared_ptr<Group> make_device_group(std::shared_ptr<Group> host, DeviceResources parts,
                                         std::chrono::nanoseconds timeout,
                                         std::chrono::nanoseconds limit);

}  // namespace pycomm
