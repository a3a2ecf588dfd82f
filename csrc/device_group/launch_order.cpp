#include "device_group/launch_order.h"

#include "core/errors.h"

namespace pycomm::device_group {

std::shared_ptr<LaunchOrder> LaunchOrder::of(const std::string& bus_id) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<LaunchOrder>> orders;
  const std::lock_guard lock(mutex);
  std::weak_ptr<LaunchOrder>& known = orders[bus_id];
  std::shared_ptr<LaunchOrder> order = known.lock();
  if (!order) known = order = std::make_shared<LaunchOrder>();
  return order;
}

std::shared_ptr<LaunchOrder::Ticket> LaunchOrder::take(std::string what) {
  const auto thread = std::this_thread::get_id();
  const std::lock_guard lock(mutex_);
  // Not make_shared: the constructor is private.
  std::shared_ptr<Ticket> ticket(new Ticket(shared_from_this(), thread, next_++));
  tickets_.emplace(ticket->key_, std::move(what));
  return ticket;
}

void LaunchOrder::wake() noexcept {
  const std::lock_guard lock(mutex_);  // a call between its question and its wait is not missed
  changed_.notify_all();
}

void LaunchOrder::Ticket::wait(const Deadline& deadline,
                               const std::function<bool()>& stopped) const {
  std::unique_lock lock(order_->mutex_);
  const auto ready = [&] { return order_->first(key_.first)->first == key_ || stopped(); };
  if (order_->changed_.wait_for(lock, deadline.left(), ready)) return;
  throw Timeout("waited " + std::to_string(deadline.limit_s()) + " s to enqueue a call after " +
                order_->first(key_.first)->second +
                ", which this thread called before; all ranks must make the collective calls of "
                "several groups in the same order");
}

bool LaunchOrder::Ticket::is_first() const {
  const std::lock_guard lock(order_->mutex_);
  return order_->first(key_.first)->first == key_;
}

void LaunchOrder::Ticket::end() noexcept {
  const std::lock_guard lock(order_->mutex_);
  if (order_->tickets_.erase(key_) > 0) order_->changed_.notify_all();
}

}  // namespace pycomm::device_group
