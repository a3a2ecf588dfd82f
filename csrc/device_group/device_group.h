// Groups for arrays on CUDA devices. They use NCCL if each rank has its own device, and stage calls
// in host memory if ranks share one, which NCCL refuses. NCCL can be limited to the ranks of each
// host; messages to other hosts then use pycomm's transports.
//
// A device group has a host group: through it the ranks agree about every call before one enqueues
// it, with the same checks, timeouts and errors, and detect failed peers. Then the call runs on the
// group's own stream, between events of the caller's stream. The first collective call connects the
// ranks; a message before it connects its two ranks only. With DeviceOptions::agree_after a call
// like an earlier one is enqueued first, and the stream waits for the agreement after it
// (agreements.h).
//
//   host     agree: all ranks have made the same call
//   caller   ... x is ready | event                      event | what uses the result ...
//   group                        wait | NCCL or a plan |
//
// No thread blocks on the device; a watchdog thread polls the enqueued calls. A call that exceeds
// its timeout, an error from NCCL or a lost rank aborts the communicator and the group, and later
// calls repeat the cause.
#pragma once

#include <chrono>
#include <memory>

#include "device_group/device_options.h"
#include "group/group.h"

namespace pycomm::device_group {

// For the ranks of `host`; calls of both groups share one order. `timeout` limits the setup of
// NCCL, and by default the agreement and the execution of each call. The call that connects the
// ranks throws the errors of `host`; Unsupported if a device does not suit NCCL, and on every rank
// if one needs NCCL and has none; Timeout if a rank is missing.
std::shared_ptr<group::Collectives> make_device_group(std::shared_ptr<group::Group> host,
                                                      DeviceResources resources,
                                                      std::chrono::nanoseconds timeout);

}  // namespace pycomm::device_group
