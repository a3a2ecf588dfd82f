// Watchdog of a device group: keeps the calls that were enqueued and are not known to be complete,
// finds out why they cannot finish, and keeps the error that ended the group. The caller decides
// what to end.
#pragma once

#include <deque>
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
#include "device_group/device_work.h"
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
  // end() fails `work` if the call is not complete by then; it may be null. Throws the cause.
  void add(std::string what, std::vector<int> peers, const Deadline& deadline,
           std::shared_ptr<DeviceWork> work);
  // The call that was added last ends with `end_event`; null: it is no longer watched. Throws the
  // cause.
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
  // Ends the group because of `error`, and fails all calls in progress. Call it before the streams
  // continue. False, without effect: the group ended before.
  bool end(const Error& error) noexcept;
  // Ends the group without an error. False: it ended before.
  bool close() noexcept;
  bool ended() const;
  // Why the group ended; none if it did not, or was closed.
  std::optional<Error> cause() const;
  // Throws the cause if it is a Mismatch, once: the caller of run() has no Work to report it.
  void throw_mismatch();

 private:
  struct Entry {
    std::string what;        // "all_reduce(float32, count 10, sum, nccl, on CUDA devices)"
    std::vector<int> peers;  // empty: all
    Deadline deadline;
    std::shared_ptr<device::Event> end_event;  // null while the call is being enqueued
    std::shared_ptr<DeviceWork> work;
  };
  std::optional<Error> lost(const Entry& oldest);
  Error with_reason(const Error& failure, const Entry& oldest);
  bool lost_for_long();
  std::optional<Error> remove_passed();
  ErrorFields fields(const Entry& oldest, int peer) const;

  group::Group& host_;
  const AsyncError async_error_;
  mutable std::mutex mutex_;  // guards the members below
  std::deque<Entry> under_way_;
  bool ended_ = false, mismatch_thrown_ = false;
  std::optional<Error> cause_;  // none if close() ended the group
  // When a lost rank or a broken group was first seen; {} if not yet.
  Clock::time_point lost_since_{};
};

}  // namespace pycomm::device_group
