// Keeps the calls of a group on a device that were enqueued and are not known to be over, and finds
// out why they cannot finish.
//
// It decides and ends nothing: its caller does. Called by device_group.cpp.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/deadline.h"
#include "core/errors.h"
#include "device/device.h"
#include "group/device_executor.h"
#include "group/group.h"

namespace pycomm {

// Any thread may call.
class Watchdog {
 public:
  // `host` tells who is lost, `executor` what became of calls.
  Watchdog(Group& host, DeviceExecutor& executor) : host_(host), executor_(executor) {}

  // `peer`: the only other rank that a call needs, or kAllPeers. `failed` is told, by end(), if
  // the call was not over by then; it may be empty.
  static constexpr int kAllPeers = -1;
  void add(std::string what, int peer, const Deadline& deadline, std::shared_ptr<Event> over,
           std::function<void(std::exception_ptr)> failed);
  bool idle();  // nothing that was added is under way, as far as look() knows
  // Whether the call that ends with `over`, which was added, is over, or end() has told of it.
  bool is_over(const Event& over);
  // Forgets what is over. The error, named after the oldest call, that ends what is not: the
  // executor's, a rank that is lost, the limit.
  std::optional<Error> look();
  // The calls under way will not finish: calls their `failed`. Before the streams continue.
  void end(const std::exception_ptr& error) noexcept;

 private:
  struct Entry {
    std::string what;  // "all_reduce(float32, count 10, sum, nccl, on CUDA devices)"
    int peer;
    Deadline deadline;
    std::shared_ptr<Event> over;
    std::function<void(std::exception_ptr)> failed;
  };
  std::optional<Error> lost(const Entry& oldest);
  Error explained(const Error& trouble, const Entry& oldest);
  bool missed_for_long();
  std::optional<Error> forget_passed();
  ErrorFields fields(const Entry& oldest, int peer) const;

  Group& host_;
  DeviceExecutor& executor_;
  std::mutex mutex_;
  std::deque<Entry> under_way_;
  Clock::time_point
      missed_{};  // when a rank was first seen to be gone, or the group to be broken; none: not yet
};

}  // namespace pycomm
