// One order of launches for all communicators of a device: ranks that enqueued the calls of two
// communicators in different orders could wait for each other, because a call occupies
// multiprocessors while it waits for its peers. The groups of a device enqueue on different
// threads, so the order is taken where the program makes the calls.
//
// A collective takes a ticket on the thread that calls it. It is enqueued once no earlier ticket of
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
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/deadline.h"

namespace pycomm::device_group {

class LaunchOrder : public std::enable_shared_from_this<LaunchOrder> {
 public:
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
    Ticket(std::shared_ptr<LaunchOrder> order, std::thread::id thread, uint64_t number)
        : order_(std::move(order)), key_(thread, number) {}

    const std::shared_ptr<LaunchOrder> order_;
    const std::pair<std::thread::id, uint64_t> key_;
  };

  // That of a device, for all groups of this process.
  static std::shared_ptr<LaunchOrder> of(const std::string& bus_id);

  // For the calling thread. `what` describes the call in errors.
  std::shared_ptr<Ticket> take(std::string what);
  // Lets waiting calls ask whether they were stopped.
  void wake() noexcept;

 private:
  using Key = std::pair<std::thread::id, uint64_t>;
  // The first ticket of the thread.
  std::map<Key, std::string>::const_iterator first(std::thread::id thread) const {
    return tickets_.lower_bound({thread, 0});
  }

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  uint64_t next_ = 0;
  std::map<Key, std::string> tickets_;
};

}  // namespace pycomm::device_group
