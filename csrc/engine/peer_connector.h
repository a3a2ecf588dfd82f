// The interface by which an engine obtains missing links; bootstrap/on_demand_connector.h
// implements it. An engine without a connector has a link to every peer from the start.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycomm::engine {

// A channel that both ends accepted, requested or not; or null and the reason why the peer cannot
// be reached.
struct ConnectResult {
  int peer = -1;
  std::unique_ptr<transport::Channel> channel{};
  std::string why{};
  bool differs = false;    // the peer has a different description of the group
  bool forbidden = false;  // the system refuses connections to it by this transport
};

// Used by one thread at a time; never waits. At most one channel for each peer.
class PeerConnector {
 public:
  virtual ~PeerConnector() = default;
  // Requests a channel to `peer`; take() returns it, or the reason of the failure.
  virtual void request(int peer) = 0;
  // The results since the last call. Cheap if there are none.
  virtual std::vector<ConnectResult> take() = 0;
  // Readable while take() has results.
  virtual int descriptor() const = 0;
  // Accepts and dials no further peer; take() returns the results until then.
  virtual void close() noexcept = 0;
};

}  // namespace pycomm::engine
