#include "os/wake_event.h"

#include <sys/eventfd.h>

#include "os/socket.h"

namespace pycomm::os {

WakeEvent::WakeEvent() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw_errno("making an eventfd");
}

// Fails only if the event is notified already.
void WakeEvent::notify() const noexcept { (void)::eventfd_write(event_.get(), 1); }

// Fails only if the event is clear already.
void WakeEvent::clear() const noexcept {
  eventfd_t count = 0;
  (void)::eventfd_read(event_.get(), &count);
}

}  // namespace pycomm::os
