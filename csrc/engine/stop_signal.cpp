#include "engine/stop_signal.h"

#include "core/errors.h"

namespace pycomm::engine {

void StopSignal::request(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
  }
  requested_.store(true);
  wake_.notify();
}

void StopSignal::suspend() noexcept {
  suspended_.store(true);
  wake_.notify();
}

void StopSignal::resume() noexcept {
  suspended_.store(false);
  clear();
}

void StopSignal::clear() noexcept {
  wake_.clear();
  if (requested_.load()) wake_.notify();  // request() may have come before clear()
}

void StopSignal::throw_requested() const {
  const std::lock_guard lock(mutex_);
  throw GroupBroken("the group was aborted: " + reason_);
}

}  // namespace pycomm::engine
