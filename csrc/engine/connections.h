// Connects missing peers during calls, through the connector if there is one.
//
// The sender opens the connection. A receiver opens it too after its first sleep without progress:
// without a connection it could not detect that the peer died.
#pragma once

#include "engine/liveness.h"
#include "engine/mismatch_protocol.h"
#include "engine/peer_connector.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class Connections {
 public:
  // `connector` may be null: then all links exist from the start.
  Connections(PeerConnector* connector, PeerTable& peers, Liveness& liveness,
              MismatchProtocol& mismatches)
      : connector_(connector), peers_(peers), liveness_(liveness), mismatches_(mismatches) {}

  void request(int peer);
  // True if a peer connected or turned out to be unreachable.
  bool accept();
  // Adds the descriptor that is readable when accept() has something to do.
  void add_to(std::vector<pollfd>& polled) const {
    if (connector_) polled.push_back({connector_->descriptor(), POLLIN, 0});
  }
  // Accepts and dials no further peer, except those that are connected already.
  void close();
  // Throws PeerLost if no message can arrive any more, because all peers left.
  void require_any_peer() const;

 private:
  PeerConnector* connector_;
  PeerTable& peers_;
  Liveness& liveness_;
  MismatchProtocol& mismatches_;
};

}  // namespace pycomm::engine
