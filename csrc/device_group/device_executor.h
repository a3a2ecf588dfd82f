// Executes the calls of a device group once its ranks have agreed about them: with NCCL, or staged
// in host memory.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "device/device.h"
#include "device/stages.h"
#include "device_group/device_options.h"
#include "group/group.h"
#include "nccl/nccl.h"

namespace pycomm::device_group {

// A call that can be enqueued.
struct DeviceCall {
  group::Call call;  // with its algorithm and its limit
  // By channel, for a call that runs as a plan between devices.
  std::shared_ptr<const std::vector<device::StreamStages>> plan{};
  bool before_agreement = false;  // later work begins after agreed(), too
};

class DeviceExecutor {
 public:
  DeviceExecutor() = default;
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;
  virtual ~DeviceExecutor() = default;  // cancels calls in progress

  // One thread at a time may call the functions from here to stats().

  // A collective's algorithm, or the one that all ranks choose for it. Throws Unsupported.
  virtual Algorithm algorithm_for(const group::Call& call) const = 0;
  // Allocates memory, before the ranks agree. Throws Unsupported if the call's stream is being
  // captured and memory would have to grow.
  virtual DeviceCall prepare(const group::Call& call) = 0;
  // Enqueues the call after `before`, an event of its stream. Returns the event of its end. May
  // wait for other ranks, until abort().
  virtual std::shared_ptr<device::Event> enqueue(const DeviceCall& device_call,
                                                 device::Event& before) = 0;
  // Whether such a call may be enqueued before the agreement, if all ranks made one like it.
  virtual bool can_precede_agreement(const group::Call& /*call*/) const { return false; }
  // The same for messages, which are concurrent; those of one peer and direction stay in order.
  virtual Algorithm algorithm_for_messages() const = 0;
  virtual void prepare_messages(std::span<const group::Call> messages) = 0;
  virtual std::shared_ptr<device::Event> enqueue_messages(std::span<const group::Call> messages,
                                                          device::Event& before) = 0;
  // Whether the message can be enqueued while its peer waits for another rank.
  virtual bool is_connected(const group::Call& message) const = 0;
  virtual group::Stats stats() const = 0;  // all fields but `calls`

  // Any thread. The ranks agreed about the oldest call that was enqueued before they did.
  virtual void agreed() noexcept {}
  // Any thread. The error because of which enqueued calls failed or will not finish, if any. `what`
  // is the oldest of these calls.
  virtual std::optional<Error> async_error(const std::string& what) = 0;
  // Call once all enqueued calls are complete.
  virtual void close(const Deadline& deadline) noexcept = 0;
  // Aborts the calls in progress on the device.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// Collective over `host`. `options` must be equal on all ranks. Throws Unsupported if NCCL refuses,
// and Timeout if a rank is missing.
std::unique_ptr<DeviceExecutor> make_nccl_executor(std::shared_ptr<group::Group> host,
                                                   std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<nccl::NcclApi> nccl,
                                                   const DeviceOptions& options,
                                                   std::chrono::nanoseconds timeout);

// The other rank of a message, and the id of the communicator.
struct NcclPeer {
  int peer;
  nccl::NcclId id;
};

// For messages with one rank, which calls this too. Throws as the above.
std::unique_ptr<DeviceExecutor> make_nccl_executor_of_two(std::shared_ptr<group::Group> host,
                                                          std::shared_ptr<device::Device> device,
                                                          std::shared_ptr<nccl::NcclApi> nccl,
                                                          const NcclPeer& peer,
                                                          const Deadline& deadline);

// Collective over `host`, for ranks of which some share a device.
std::unique_ptr<DeviceExecutor> make_host_staged_executor(const std::shared_ptr<group::Group>& host,
                                                          std::shared_ptr<device::Device> device);

// For messages between the two ranks of `pair`, whose calls name the peer by its rank elsewhere.
std::unique_ptr<DeviceExecutor> make_host_staged_executor_of_two(
    std::shared_ptr<group::Group> pair, std::shared_ptr<device::Device> device);

}  // namespace pycomm::device_group
