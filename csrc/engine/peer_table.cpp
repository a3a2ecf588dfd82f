#include "engine/peer_table.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace pycomm::engine {
namespace {

// Bytes that a peer does not take within this time are left to its channel. A wait notices a signal
// within 100 ms; together these bound the time that Ctrl-C takes.
constexpr std::chrono::milliseconds kFlushTimeout{100};

}  // namespace

PeerTable::PeerTable(Identity identity, std::vector<std::unique_ptr<transport::Channel>> channels)
    : rank_(identity.rank),
      names_(std::move(identity.names)),
      peers_(channels.size()),
      processes_(std::move(identity.pids), channels.size()) {
  for (int peer = 0; peer < size(); ++peer)
    if (auto& channel = channels[static_cast<size_t>(peer)]) connect(peer, std::move(channel));
}

void PeerTable::connect(int peer, std::unique_ptr<transport::Channel> channel) {
  at(peer).link = std::make_unique<Link>(std::move(channel));
  processes_.watch(peer);
}

void PeerTable::flush_all() {
  const Deadline deadline(kFlushTimeout);
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<transport::Channel*> armed;
    for (Peer& peer : peers_) {
      if (!peer.link || peer.link->channel().is_closed() || peer.link->flush()) continue;
      waiting.push_back(peer.link->channel().arm({false, true}));
      armed.push_back(&peer.link->channel());
      if (peer.link->flush()) waiting.back().fd = -1;  // sent in the meantime: do not sleep
    }
    if (armed.empty()) return;
    const bool idle = std::ranges::all_of(waiting, [](const pollfd& p) { return p.fd >= 0; });
    if (idle) ::poll(waiting.data(), waiting.size(), 10);
    for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(waiting[i].revents);
    if (deadline.expired()) return;
  }
}

void PeerTable::close_all() noexcept {
  for (Peer& peer : peers_)
    if (peer.link) peer.link->close();
}

PeerLost PeerTable::lost(int peer) const {
  const Peer& gone = at(peer);
  const auto protocol_error =
      gone.link ? gone.link->channel().protocol_error() : std::string_view{};
  if (!protocol_error.empty()) return violation(peer, protocol_error);
  const std::string unexpected =
      processes_.ended(peer) && gone.link && !gone.link->channel().is_closed()
          ? "died: its process ended without a goodbye message"
          : "died or lost its connection: the connection closed unexpectedly";
  return PeerLost(name(peer) + " " + gone.left_reason.value_or(unexpected), {.peer = peer});
}

PeerLost PeerTable::violation(int peer, std::string_view what) const {
  return PeerLost("protocol error from " + name(peer) + ": " + std::string(what), {.peer = peer});
}

}  // namespace pycomm::engine
