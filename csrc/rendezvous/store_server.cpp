// See store_server.h.
#include "rendezvous/store_server.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "os/random.h"
#include "os/thread.h"

namespace pycomm::rendezvous {
namespace {

// The reply to `hello`: the server's random name, a blank, the port for clients that reconnect.
std::string hello(const os::Fd& reconnect_listener) {
  return os::random_name() + " " +
         std::to_string(os::local_address(reconnect_listener.get()).port());
}

}  // namespace

StoreServer::StoreServer(const os::Address& address, std::string key,
                         std::chrono::nanoseconds handshake_limit)
    : listener_(os::listen_on(address)),
      reconnect_listener_(os::listen_on(address.with_port(0))),
      port_(os::local_address(listener_.get()).port()),
      handler_(hello(reconnect_listener_), wake_),
      clients_(handler_, std::move(key), handshake_limit),
      owner_(::getpid()) {
  thread_ = os::start_thread("pycomm-store", [this] { run(); });
}

StoreServer::~StoreServer() {
  if (::getpid() != owner_) {  // a forked child: thread and listeners belong to the parent
    thread_.detach();
    return;
  }
  stopping_ = true;
  wake_.notify();
  thread_.join();
}

void StoreServer::stop_listening() {
  ListenerState open = ListenerState::open;
  listener_state_.compare_exchange_strong(open, ListenerState::closing);
  wake_.notify();
  listener_state_.wait(ListenerState::closing);
}

// Closes the public listener, on the thread that polls it, and the pending connections.
void StoreServer::shut_down() {
  listener_.reset();
  clients_.drop_pending();
  listener_state_ = ListenerState::closed;
  listener_state_.notify_all();
}

void StoreServer::run() try {
  while (!stopping_) {
    if (listener_state_ == ListenerState::closing) shut_down();
    run_once();
  }
} catch (const std::exception&) {
  // Out of memory, or a bug. Closes all connections, so that no client waits for a dead server.
  clients_.clear();
  reconnect_listener_.reset();
  shut_down();
}

// Waits for an event or a deadline, and handles it.
void StoreServer::run_once() {
  std::vector<pollfd> polled{{wake_.descriptor(), POLLIN, 0}};
  const bool listening = clients_.can_accept();
  for (const os::Fd* listener : {&listener_, &reconnect_listener_})
    polled.push_back({listening ? listener->get() : -1, POLLIN, 0});
  const size_t first_client = polled.size();
  clients_.append_awaited(polled);
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(clients_.next_deadline() - Clock::now());
  const auto wait_ms = std::max<std::chrono::milliseconds::rep>(left.count(), 0);
  if (::poll(polled.data(), polled.size(), static_cast<int>(wait_ms)) < 0 && errno != EINTR)
    os::throw_errno("polling the store's sockets");
  if (polled[0].revents != 0) wake_.clear();
  clients_.advance(std::span(polled).subspan(first_client));
  if (polled[1].revents != 0) clients_.accept_from(listener_);
  if (polled[2].revents != 0) clients_.accept_from(reconnect_listener_);
}

}  // namespace pycomm::rendezvous
