#include "device_group/launch_order.h"

#include <map>

#include "core/errors.h"
#include "group/check.h"

namespace pycomm::device_group {

struct LaunchOrder::Tickets {
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  uint64_t next = 0;
  std::map<Ticket::Key, std::string> all;

  // The first ticket of the thread.
  std::map<Ticket::Key, std::string>::const_iterator first(std::thread::id thread) const {
    return all.lower_bound({thread, 0});
  }
  static std::shared_ptr<Tickets> of(const std::string& bus_id) {
    static std::mutex guard;
    static std::map<std::string, std::weak_ptr<Tickets>> by_device;
    const std::lock_guard lock(guard);
    std::weak_ptr<Tickets>& known = by_device[bus_id];
    std::shared_ptr<Tickets> tickets = known.lock();
    if (!tickets) known = tickets = std::make_shared<Tickets>();
    return tickets;
  }
};

LaunchOrder::LaunchOrder(const std::string& bus_id) : tickets_(Tickets::of(bus_id)) {}

std::unique_ptr<LaunchOrder, LaunchOrder::Leave> LaunchOrder::enter(
    std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  if (!left_.wait_for(lock, limit, [this] { return !entered_; }))
    throw Timeout("another thread was inside calls of this group for " +
                  std::to_string(std::chrono::duration<double>(limit).count()) + " s");
  entered_ = true;
  return std::unique_ptr<LaunchOrder, Leave>(this);
}

void LaunchOrder::leave() noexcept {
  {
    const std::lock_guard lock(mutex_);
    entered_ = false;
  }
  left_.notify_one();
}

std::shared_ptr<LaunchOrder::Ticket> LaunchOrder::take(std::string what) {
  const std::lock_guard lock(tickets_->mutex);
  const Ticket::Key key(std::this_thread::get_id(), tickets_->next++);
  // Not make_shared: the constructor is private.
  std::shared_ptr<Ticket> ticket(new Ticket(tickets_, key));
  tickets_->all.emplace(key, std::move(what));
  return ticket;
}

void LaunchOrder::wake() noexcept {
  const std::lock_guard lock(tickets_->mutex);  // a call before its wait is not missed
  tickets_->changed.notify_all();
}

void LaunchOrder::Ticket::wait(const Deadline& deadline,
                               const std::function<bool()>& stopped) const {
  std::unique_lock lock(tickets_->mutex);
  const auto ready = [&] { return tickets_->first(key_.first)->first == key_ || stopped(); };
  if (tickets_->changed.wait_for(lock, deadline.left(), ready)) return;
  throw Timeout("waited " + std::to_string(deadline.limit_s()) + " s to enqueue a call after " +
                tickets_->first(key_.first)->second +
                ", which this thread called before; all ranks must make the collective calls of "
                "several groups in the same order");
}

bool LaunchOrder::Ticket::is_first() const {
  const std::lock_guard lock(tickets_->mutex);
  return tickets_->first(key_.first)->first == key_;
}

void LaunchOrder::Ticket::end() noexcept {
  const std::lock_guard lock(tickets_->mutex);
  if (tickets_->all.erase(key_) > 0) tickets_->changed.notify_all();
}

LaunchOrder::Signature LaunchOrder::signature(group::Call call) {
  if (group::is_plan(call.operation)) call.tag = 0;  // the same call in each pass
  const transport::Header header = group::signature_of(call, call.algorithm);
  return {header.operation, header.dtype, header.op, header.algorithm, header.count, header.peer};
}

void LaunchOrder::learn(const group::Call& call) {
  constexpr size_t kMostKnown = 1024;
  const std::lock_guard lock(mutex_);
  if (known_.size() >= kMostKnown) known_.clear();
  known_.insert(signature(call));
}

bool LaunchOrder::may_precede(const group::Call& call, const Ticket& ticket) const {
  if (*waiting_ > 0 || *pending_ >= kMostPending || !ticket.is_first()) return false;
  const std::lock_guard lock(mutex_);
  return known_.contains(signature(call));
}

}  // namespace pycomm::device_group
