// An asynchronous call of a device group.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "device/device.h"
#include "group/group.h"

namespace pycomm::device_group {

// Of the end of a call: one for each communicator, or group for staging, that it uses.
using Events = std::vector<std::shared_ptr<device::Event>>;

// The host group's worker runs the agreement and then enqueues the call, unless the caller enqueued
// it before.
class DeviceWork final : public group::Work {
 public:
  // `is_over`: whether the device has reached the call's event and the call was not aborted.
  explicit DeviceWork(std::function<bool(const device::Event&)> is_over)
      : is_over_(std::move(is_over)) {}

  void capture() { captured_ = true; }
  bool captured() const override { return captured_; }
  // Sets the agreement, after which the worker calls complete().
  void set_agreement(std::shared_ptr<group::Work> agreed) { agreed_ = std::move(agreed); }
  void complete(Events end_events, std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      end_events_ = std::move(end_events);
      if (error) error_ = std::move(error);  // fail() may come first
      completed_ = true;
    }
    changed_.notify_all();
  }
  // The call was enqueued but aborted before it completed.
  void fail(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }

  // A captured call is done once it is enqueued; so is a call on a device that reports an error.
  bool done() const override {
    Events end_events;
    {
      const std::lock_guard lock(mutex_);
      if (!completed_) return false;
      if (error_ || captured_) return true;
      end_events = end_events_;
    }
    try {  // unlocked: fail() takes the lock
      return std::ranges::all_of(end_events, [&](const auto& one) { return is_over_(*one); });
    } catch (const InternalError&) {  // the next use of the device reports it
      return true;
    }
  }
  std::exception_ptr error() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  void wait(std::chrono::nanoseconds limit) override {
    if (agreed_) agreed_->wait(limit);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return completed_; });  // short: only enqueueing remains
    if (error_) std::rethrow_exception(error_);
  }
  void make_stream_wait(void* stream) override {
    const std::lock_guard lock(mutex_);
    check(completed_, "wait() must return before make_stream_wait()");
    for (const auto& end_event : end_events_) end_event->stream_wait(stream);
  }

 private:
  std::function<bool(const device::Event&)> is_over_;
  std::shared_ptr<group::Work> agreed_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool completed_ = false, captured_ = false;
  Events end_events_;
  std::exception_ptr error_;
};

}  // namespace pycomm::device_group
