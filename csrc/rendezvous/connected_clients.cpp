// See connected_clients.h.
#include "rendezvous/connected_clients.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"
#include "rendezvous/store_frame.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {
namespace {

// Connections accepted per round, before other sockets have their turn.
constexpr int kAcceptsPerRound = 16;
// Pause of accepting when no descriptor is left and no pending connection can be evicted.
constexpr std::chrono::milliseconds kAcceptPause{100};

bool is_pending(const ClientConnection& client) { return client.is_pending(); }

}  // namespace

ConnectedClients::ConnectedClients(RequestHandler& handler, std::string key,
                                   std::chrono::nanoseconds handshake_limit)
    : handler_(handler), key_(std::move(key)), handshake_limit_(handshake_limit) {
  if (key_.empty()) throw InvalidArgument("the key of a store is empty");
}

void ConnectedClients::accept_from(const os::Fd& listener) {
  auto pending = static_cast<size_t>(std::ranges::count_if(clients_, is_pending));
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    bool exhausted = false;
    os::Fd fd = os::accept_from(listener.get(), &exhausted);
    if (exhausted && !evict()) accept_again_ = Clock::now() + kAcceptPause;
    if (!fd) return;
    os::keep_alive(fd.get());
    if (admission_.is_full(pending) && evict()) --pending;
    const uint64_t source = transport::source_of(fd.get());
    clients_.emplace_back(
        transport::Handshake(std::move(fd), transport::Handshake::Role::listener, key_,
                             {std::string(store_frame::kContext), store_frame::kServerRank,
                              store_frame::kClientRank},
                             handshake_limit_),
        source);
    ++pending;
    // Reads the greeting if it has arrived: evict() prefers connections without one.
    if (clients_.back().advance(POLLIN, handler_)) continue;
    clients_.pop_back();
    --pending;
  }
}

void ConnectedClients::append_awaited(std::vector<pollfd>& polled) const {
  for (const ClientConnection& client : clients_) polled.push_back(client.awaited());
}

Clock::time_point ConnectedClients::next_deadline() const {
  const auto now = Clock::now();
  auto next = now + ClientConnection::kLongestWait;
  if (accept_again_ > now) next = accept_again_;
  for (const ClientConnection& client : clients_) next = std::min(next, client.deadline());
  return next;
}

void ConnectedClients::advance(std::span<const pollfd> polled) {
  size_t at = 0;
  for (auto client = clients_.begin(); client != clients_.end(); ++at)
    client =
        client->advance(polled[at].revents, handler_) ? std::next(client) : clients_.erase(client);
}

void ConnectedClients::drop_pending() { std::erase_if(clients_, is_pending); }

}  // namespace pycomm::rendezvous
