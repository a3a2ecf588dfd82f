#include "os/wake_event.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <mutex>

#include "os/socket.h"

namespace pycomm::os {
namespace {

// Always readable. Every event has it among its sockets, and waits for it while it is notified: so
// an event needs no descriptor of its own.
std::shared_ptr<const Fd> readable_descriptor() {
  static std::mutex mutex;
  static auto* const known = new std::weak_ptr<const Fd>;  // never destroyed
  const std::lock_guard lock(mutex);
  auto one = known->lock();
  if (one && *one) return one;  // a forked process opens another
  *known = one = std::make_shared<const Fd>(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!*one) throw_errno("making an eventfd");
  return one;
}

}  // namespace

WakeEvent::WakeEvent() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), readable_(readable_descriptor()) {
  epoll_event never{};
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, readable_->get(), &never) != 0)
    throw_errno("making an epoll descriptor");
}

// Fails only in a forked process: it allocates nothing.
void WakeEvent::wait_for_readable(unsigned events) const noexcept {
  epoll_event event{.events = events, .data = {}};
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, readable_->get(), &event);
}

void WakeEvent::notify() const noexcept { wait_for_readable(EPOLLIN); }
void WakeEvent::clear() const noexcept { wait_for_readable(0); }

void WakeEvent::watch(int socket, bool& readable) const {
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.ptr = &readable}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event) != 0)
    throw_errno("waiting for a socket by epoll");
}

void WakeEvent::unwatch(int socket) const noexcept {
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
}

int WakeEvent::poll(std::vector<pollfd>& polled, std::chrono::milliseconds limit) const {
  polled.push_back({epoll_.get(), POLLIN, 0});
  const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(limit.count()));
  std::array<epoll_event, 64> events;
  const int count =
      polled.back().revents == 0 ? 0 : ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  polled.pop_back();
  for (int i = 0; i < count; ++i)
    if (void* const readable = events[static_cast<size_t>(i)].data.ptr)
      *static_cast<bool*>(readable) = true;
  return ready;
}

}  // namespace pycomm::os
