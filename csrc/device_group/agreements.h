// Which calls of a device group may be enqueued before the ranks agree about them.
//
// A mismatch is rare if the ranks agreed about such a call before. The stream continues after the
// call only when the ranks agreed about this one, too (device/host_gate.h). Each rank decides for
// itself, as the agreement is the same either way; but a communicator needs one order of calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/errors.h"
#include "group/check.h"
#include "group/group.h"

namespace pycomm::device_group {

// Any thread may call.
class Agreements {
 public:
  // Calls that are enqueued and not agreed about, at most. It bounds how far ranks are apart.
  static constexpr int kMostPending = 64;

  // The ranks agreed about the call.
  void learn(const group::Call& call) {
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMostKnown) known_.clear();
    known_.insert(signature(call));
  }
  bool allows(const group::Call& call) const {
    if (*waiting_ > 0 || *pending_ >= kMostPending) return false;
    const std::lock_guard lock(mutex_);
    return !stopped_ && known_.contains(signature(call));
  }

  // Counts a call while it lives.
  using Count = std::shared_ptr<void>;
  Count count_pending() const { return count(pending_); }  // enqueued, and not agreed about
  Count count_waiting() const { return count(waiting_); }  // to be enqueued after its agreement
  bool any_pending() const { return *pending_ > 0; }
  // Waits until the ranks have agreed about each enqueued call, or did not within its limit.
  void wait_for_pending() const {
    for (int count = *pending_; count > 0; count = *pending_) pending_->wait(count);
  }

  // The group ended, because of `error`.
  void stop(const Error& error) {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    if (error.kind() == ErrorKind::mismatch) mismatch_ = error;
  }
  // Throws the Mismatch that ended the group, once: the caller of run() has no Work to report it.
  void throw_mismatch() {
    const std::lock_guard lock(mutex_);
    if (const auto late = std::exchange(mismatch_, std::nullopt)) throw Error(*late);
  }

 private:
  static constexpr size_t kMostKnown = 1024;
  using Counter = std::shared_ptr<std::atomic<int>>;
  using Signature = std::tuple<uint8_t, uint8_t, uint8_t, uint8_t, uint64_t, uint32_t>;
  static Signature signature(group::Call call) {
    if (group::is_plan(call.operation)) call.tag = 0;  // the same call in each pass
    const transport::Header header = group::signature_of(call, call.algorithm);
    return {header.operation, header.dtype, header.op, header.algorithm, header.count, header.peer};
  }
  static Count count(const Counter& counter) {
    ++*counter;
    return {nullptr, [counter](void*) {
              --*counter;
              counter->notify_all();
            }};
  }

  const Counter pending_ = std::make_shared<std::atomic<int>>(0);
  const Counter waiting_ = std::make_shared<std::atomic<int>>(0);
  mutable std::mutex mutex_;  // guards the members below
  std::set<Signature> known_;
  bool stopped_ = false;
  std::optional<Error> mismatch_;
};

}  // namespace pycomm::device_group
