// See connection_pool.h.
#include "rendezvous/connection_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace pycomm::rendezvous {

std::optional<ServerConnection> ConnectionPool::take(const Deadline& deadline) {
  {
    std::unique_lock lock(mutex_);
    const auto turn = turns_.insert(turns_.end(), std::monostate{});
    const auto may_take = [&] {
      return turn == turns_.begin() && (!idle_.empty() || !fixed_size_ || in_use_ == 0);
    };
    bool interrupted = false;
    while (!may_take() && !interrupted && !deadline.expired()) {
      changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()));
      lock.unlock();
      interrupted = wait_.is_interrupted();
      lock.lock();
    }
    const bool may = may_take();
    turns_.erase(turn);
    changed_.notify_all();
    if (!may) {
      lock.unlock();
      wait_.check_interrupted();
      return std::nullopt;
    }
    ++in_use_;
    if (!idle_.empty()) {
      ServerConnection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  try {
    return dialer_.open(deadline);
  } catch (...) {  // no connection is in use
    give_back(std::nullopt);
    throw;
  }
}

void ConnectionPool::give_back(std::optional<ServerConnection> connection) {
  {
    const std::lock_guard lock(mutex_);
    --in_use_;
    if (connection) idle_.push_back(std::move(*connection));
  }
  changed_.notify_all();
}

void ConnectionPool::stop_growing() {
  dialer_.only_reconnect();
  const std::lock_guard lock(mutex_);
  fixed_size_ = true;
}

}  // namespace pycomm::rendezvous
