// Watchdog of a device group: keeps the calls that were enqueued and are not known to be complete,
// and finds out why they cannot finish. The caller decides what to end.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "device/device.h"
#include "group/group.h"

namespace pycomm::device_group {

// Any thread may call.
class Watchdog {
 public:
  // As DeviceExecutor::async_error().
  using AsyncError = std::function<std::optional<Error>(const std::string& what)>;
  // `host` reports lost ranks, `async_error` failed calls.
  Watchdog(group::Group& host, AsyncError async_error)
      : host_(host), async_error_(std::move(async_error)) {}

  // Adds a call that is about to be enqueued. `peers`: the other ranks that it needs; empty: all.
  // end() calls `failed` if the call is not complete by then; it may be empty.
  void add(std::string what, std::vector<int> peers, const Deadline& deadline,
           std::function<void(std::exception_ptr)> failed);
  // The call that was added last ends with `end_event`; null: it is no longer watched. None after
  // end().
  void set_end(std::shared_ptr<device::Event> end_event);
  bool idle();  // whether no call is in progress, as of the last look()
  // Whether the added call that ends with `end_event` is complete, or end() reported its failure.
  bool is_over(const device::Event& end_event);
  // Removes completed calls. Returns the error that ends the others, named after the oldest call:
  // an error of the executor, a lost rank, or the timeout. `agreeing`: the ranks still agree about
  // enqueued calls, and that reports lost and late ranks. Then it returns none, unless a call
  // exceeds its limit by a second.
  std::optional<Error> look(bool agreeing = false);
  // `failure` of the call that was added last and cannot be enqueued. With the reason of the rank
  // that aborted, if it sent one: it may wait a second for that.
  Error error_of_last(const Error& failure);
  // Calls `failed` of all calls in progress, which will not finish. Call it before the streams
  // continue.
  void end(const std::exception_ptr& error) noexcept;

 private:
  struct Entry {
    std::string what;        // "all_reduce(float32, count 10, sum, nccl, on CUDA devices)"
    std::vector<int> peers;  // empty: all
    Deadline deadline;
    std::shared_ptr<device::Event> end_event;  // null while the call is being enqueued
    std::function<void(std::exception_ptr)> failed;
  };
  std::optional<Error> lost(const Entry& oldest);
  Error with_reason(const Error& failure, const Entry& oldest);
  bool lost_for_long();
  std::optional<Error> remove_passed();
  ErrorFields fields(const Entry& oldest, int peer) const;

  group::Group& host_;
  const AsyncError async_error_;
  std::mutex mutex_;
  std::deque<Entry> under_way_;
  // When a lost rank or a broken group was first seen; {} if not yet.
  Clock::time_point lost_since_{};
};

}  // namespace pycomm::device_group
