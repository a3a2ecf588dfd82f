// Executes the calls of a device group once its ranks have agreed about them: with NCCL, or staged
// in host memory.
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
#include "device_group/device_options.h"
#include "device_group/device_work.h"
#include "device_group/launch_order.h"
#include "group/check.h"
#include "group/group.h"
#include "nccl/nccl.h"

namespace pycomm::device_group {

// One launch: a collective, or messages of one executor, which are concurrent; those of one peer
// and direction stay in order.
struct Launch {
  std::vector<group::Call> calls;  // with their algorithm and their limit
  Deadline deadline{std::chrono::nanoseconds{0}};
  std::shared_ptr<device::Event> before{};  // of the caller's stream; the launch begins after it
  bool captured = false;                    // into a graph
  bool before_agreement = false;            // later work begins after agreed(), too
  std::shared_ptr<LaunchOrder::Ticket> ticket{};  // of a collective
  std::shared_ptr<DeviceWork> work{};             // null: the caller waits on its own thread
  // By channel, for a collective that runs as a plan between devices.
  std::shared_ptr<const std::vector<device::StreamStages>> plan{};

  const group::Call& first() const { return calls.front(); }
  bool has_messages() const { return !group::is_plan(first().operation); }
  void* stream() const { return first().device.stream; }
};

class DeviceExecutor {
 public:
  DeviceExecutor() = default;
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;
  virtual ~DeviceExecutor() = default;  // cancels calls in progress

  // One thread at a time may call the functions from here to stats().

  // The algorithm of a call, or the one that all ranks choose for it. Throws Unsupported.
  virtual Algorithm algorithm_for(const group::Call& call) const = 0;
  // Allocates memory, of a collective before the ranks agree. Throws Unsupported if the stream is
  // being captured and memory would have to grow.
  virtual void prepare(Launch& launch) = 0;
  // Returns the event of the end. May wait for other ranks, until abort().
  virtual std::shared_ptr<device::Event> enqueue(const Launch& launch) = 0;
  // Whether such a collective may be enqueued before the agreement, if all ranks made one like it.
  virtual bool can_precede_agreement(const group::Call& /*call*/) const { return false; }
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
