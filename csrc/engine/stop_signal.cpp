#include "engine/stop_signal.h"

#include <unistd.h>

#include "core/errors.h"

namespace pycomm {

void StopSignal::request(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
  }
  requested_.store(true);
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void StopSignal::throw_requested() const {
  const std::lock_guard lock(mutex_);
  throw GroupBroken("the group was aborted: " + reason_);
}

}  // namespace pycomm
