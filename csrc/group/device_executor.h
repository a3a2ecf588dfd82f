// Executes the calls of a group on devices once its ranks have agreed about them: by NCCL between
// the devices, or staged in host memory.
//
// It checks no arrays, agrees with no peer and supervises nothing. Called by device_group.cpp and
// watchdog.cpp.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "device/device.h"
#include "device/stages.h"
#include "group/device_group.h"
#include "group/group.h"
#include "nccl/nccl.h"

namespace pycomm {

// A call that can be enqueued.
struct DeviceCall {
  Call call;  // with its algorithm and its limit
  // By lane, where one runs between devices.
  std::shared_ptr<const std::vector<StreamStages>> plan{};
};

class DeviceExecutor {
 public:
  DeviceExecutor() = default;
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;
  virtual ~DeviceExecutor() = default;  // ends what is under way

  // One thread at a time calls those from here to stats().

  // The one that is named, or what all ranks take for the call. Throws Unsupported.
  virtual Algorithm algorithm_for(const Call& call) const = 0;
  // Before the ranks agree: sees to memory. Throws Unsupported where the call's stream is being
  // captured and there is too little of it.
  virtual DeviceCall prepare(const Call& call) = 0;
  virtual std::shared_ptr<Event> event() = 0;
  // Enqueues the call behind `before`, an event of its stream; gives the event of its end.
  virtual std::shared_ptr<Event> enqueue(const DeviceCall& device_call, Event& before,
                                         const Deadline& deadline) = 0;
  virtual Stats stats() const = 0;  // without the calls

  // From any thread. Why calls that were enqueued will not be over, or have ended badly; `what`
  // is the first of them.
  virtual std::optional<Error> trouble(const std::string& what) = 0;
  // When all that was enqueued is over.
  virtual void close(const Deadline& deadline) noexcept = 0;
  // What is under way ends on the device.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Collective over `host`; `lines` are the same on all ranks. Throws Unsupported where NCCL refuses,
// Timeout where ranks do not come.
std::unique_ptr<DeviceExecutor> make_nccl_executor(std::shared_ptr<Group> host,
                                                   std::shared_ptr<Device> device,
                                                   std::shared_ptr<NcclApi> nccl,
                                                   const DeviceOptions& options,
                                                   std::chrono::nanoseconds timeout);

// Collective over `host`: for ranks of which some share a device.
std::unique_ptr<DeviceExecutor> make_host_staged_executor(const std::shared_ptr<Group>& host,
                                                          std::shared_ptr<Device> device);

}  // namespace pycomm
