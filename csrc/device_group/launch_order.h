// The order in which a group enqueues its calls, and in which all groups of a device do.
//
// Threads. One thread at a time is inside the calls of a group; others wait for it.
//
// Groups. Ranks that enqueued the calls of two communicators in different orders could wait for
// each other, because a call occupies multiprocessors while it waits for its peers. The groups of a
// device enqueue on different threads, so the order is taken where the program makes the calls: a
// collective takes a ticket on the thread that calls it, and is enqueued once no earlier ticket of
// that thread is left. A ticket ends when its call is enqueued, or fails before it.
//
// Why this adds no deadlock, if all ranks make their calls in an order that agrees with one order
// of all calls: take the first call of that order that is not enqueued everywhere. The calls before
// it are enqueued, so each of its ranks reaches it, the agreement completes, and no ticket precedes
// its own. The agreement itself never waits for a ticket. Ranks with different orders may wait
// until the timeout of a call, whose error names the earlier one.
//
// Calls of different threads have no order that ranks could share, and do not wait for each other.
// Messages take no ticket: a program may post a receive long before its peer sends.
//
// Agreement. With DeviceOptions::agree_after a call may be enqueued before the ranks agree about
// it. A mismatch is rare if the ranks agreed about such a call before. The stream continues after
// the call only when the ranks agreed about this one, too (device/host_gate.h). Each rank decides
// for itself, as the agreement is the same either way; but a communicator needs one order of calls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "core/deadline.h"
#include "group/group.h"

namespace pycomm::device_group {

// Of a group. Any thread may call.
class LaunchOrder {
  struct Tickets;  // of the threads that use a device

 public:
  // Calls that are enqueued and not agreed about, at most. It bounds how far ranks are apart.
  static constexpr int kMostPending = 64;

  class Ticket {
   public:
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { end(); }
    // Waits until this is the first ticket of its thread. Throws Timeout; returns early if
    // `stopped`, which wake() lets it ask.
    void wait(const Deadline& deadline, const std::function<bool()>& stopped) const;
    bool is_first() const;  // whether wait() would return at once
    // Lets the next call proceed. Any thread; a second call has no effect.
    void end() noexcept;

   private:
    friend class LaunchOrder;
    using Key = std::pair<std::thread::id, uint64_t>;
    Ticket(std::shared_ptr<Tickets> tickets, const Key& key)
        : tickets_(std::move(tickets)), key_(key) {}

    const std::shared_ptr<Tickets> tickets_;
    const Key key_;
  };

  // Groups with this bus id share the tickets.
  explicit LaunchOrder(const std::string& bus_id);

  // While the result lives, other threads wait here. Throws Timeout.
  struct Leave {
    void operator()(LaunchOrder* order) const noexcept { order->leave(); }
  };
  std::unique_ptr<LaunchOrder, Leave> enter(std::chrono::nanoseconds limit);
  // For the calling thread. `what` describes the call in errors.
  std::shared_ptr<Ticket> take(std::string what);
  // Lets waiting calls ask whether they were stopped.
  void wake() noexcept;

  // The ranks agreed about the call.
  void learn(const group::Call& call);
  // Whether the call may be enqueued before its agreement: later calls must be enqueued later, so
  // not while another call waits for its agreement, or for a call of another group.
  bool may_precede(const group::Call& call, const Ticket& ticket) const;
  // Counts a call while it lives.
  using Count = std::shared_ptr<void>;
  Count count_pending() const { return count(pending_); }  // enqueued, and not agreed about
  Count count_waiting() const { return count(waiting_); }  // to be enqueued after its agreement
  bool any_pending() const { return *pending_ > 0; }
  // Waits until the ranks have agreed about each enqueued call, or did not within its limit.
  void wait_for_pending() const {
    for (int count = *pending_; count > 0; count = *pending_) pending_->wait(count);
  }

 private:
  using Counter = std::shared_ptr<std::atomic<int>>;
  using Signature = std::tuple<uint8_t, uint8_t, uint8_t, uint8_t, uint64_t, uint32_t>;
  static Signature signature(group::Call call);
  static Count count(const Counter& counter) {
    ++*counter;
    return {nullptr, [counter](void*) {
              --*counter;
              counter->notify_all();
            }};
  }

  void leave() noexcept;

  const std::shared_ptr<Tickets> tickets_;
  const Counter pending_ = std::make_shared<std::atomic<int>>(0);
  const Counter waiting_ = std::make_shared<std::atomic<int>>(0);
  mutable std::mutex mutex_;  // guards the members below
  std::set<Signature> known_;
  std::condition_variable left_;
  bool entered_ = false;  // a thread is inside the group
};

}  // namespace pycomm::device_group
