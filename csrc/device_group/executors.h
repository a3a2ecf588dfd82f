// The executors of a device group: one of all ranks, and those of two ranks that exchange messages
// before it exists.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "device_group/device_executor.h"
#include "device_group/device_options.h"
#include "group/group.h"

namespace pycomm::device_group {

class Executors {
 public:
  Executors(std::shared_ptr<group::Group> host, DeviceResources resources,
            std::chrono::nanoseconds timeout)
      : host_(std::move(host)), resources_(std::move(resources)), timeout_(timeout) {}

  // Collective over `host`: creates the executor of all ranks, if there is none. All ranks must
  // call within `limit`. Throws as make_device_group() says.
  void form(std::chrono::nanoseconds limit);
  // Null before form().
  DeviceExecutor* of_all() const { return of(kAllPeers); }
  // For a message that this rank and `peer` agreed about: that of all ranks if it exists, otherwise
  // that of the two, which both create here by the deadline. Both ranks choose alike: form() needs
  // all ranks, and none of them is in a message then.
  DeviceExecutor& for_message(int peer, const Deadline& deadline);
  // Messages that may be enqueued together. All, unless NCCL would wait for a peer that it is not
  // connected to: that peer may wait for another message of this rank. Then those of one peer and
  // direction, which the peer waits for too.
  std::vector<std::span<const group::Call>> concurrent_parts(
      std::span<const group::Call> calls) const;

  group::Stats stats() const;  // as of DeviceExecutor
  // Any thread may call these, and of_all(); as of DeviceExecutor.
  std::optional<Error> async_error(const std::string& what) const;
  void close(const Deadline& deadline) noexcept;
  void abort(const std::string& reason) noexcept;

 private:
  static constexpr int kAllPeers = -1;
  DeviceExecutor* of(int peer) const;
  // The executor that for_message() would use; null if it would create one.
  DeviceExecutor* existing_for_message(int peer) const;
  std::unique_ptr<DeviceExecutor> make_of_all(std::chrono::nanoseconds limit);
  std::unique_ptr<DeviceExecutor> make_of_two(int peer, const Deadline& deadline);
  DeviceExecutor& keep(int peer, std::unique_ptr<DeviceExecutor> made);
  std::vector<DeviceExecutor*> all() const;

  const std::shared_ptr<group::Group> host_;
  const DeviceResources resources_;
  const std::chrono::nanoseconds timeout_;
  mutable std::mutex mutex_;  // guards the members below
  // By peer, or kAllPeers.
  std::map<int, std::unique_ptr<DeviceExecutor>> executors_;
  std::optional<std::string> aborted_;  // the reason
};

}  // namespace pycomm::device_group
