#include "engine/connections.h"

#include <algorithm>
#include <utility>

namespace pycomm::engine {

void Connections::request(int peer) {
  Peer& state = peers_.at(peer);
  if (state.link || state.requested || state.left_reason || connector_ == nullptr) return;
  state.requested = true;
  liveness_.restart(peer, Clock::now());
  connector_->request(peer);
}

bool Connections::accept() {
  if (connector_ == nullptr) return false;
  std::vector<ConnectResult> arrivals = connector_->take();
  for (ConnectResult& arrival : arrivals) {
    Peer& state = peers_.at(arrival.peer);
    if (state.link) continue;
    if (!arrival.channel) {
      state.left_reason = "cannot be reached: " + arrival.why + "; it died or left the group";
      continue;
    }
    peers_.connect(arrival.peer, std::move(arrival.channel));
    liveness_.restart(arrival.peer, Clock::now());
    mismatches_.introduce(arrival.peer);
  }
  return !arrivals.empty();
}

void Connections::close() {
  if (connector_ != nullptr) connector_->close();
  (void)accept();
}

void Connections::require_any_peer() const {
  if (connector_ == nullptr && std::ranges::all_of(peers_.all(), [](const Peer& peer) {
        return !peer.link || peer.left_reason;
      }))
    throw PeerLost("all other ranks left the group, and none sent a message before");
}

}  // namespace pycomm::engine
