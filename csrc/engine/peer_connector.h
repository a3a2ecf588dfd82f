// How an engine obtains links that it does not have yet. Pure: group/on_demand_connector.h makes
// them.
//
// An engine without a connector holds a link to every peer from the start.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycomm {

// A channel that both ends have accepted, requested or not; or, without one, why the peer cannot be
// reached.
struct ConnectResult {
  int peer = -1;
  std::unique_ptr<Channel> channel{};
  std::string why{};
  bool differs = false;    // the peer was given another description of the group
  bool forbidden = false;  // the system refuses connections to it by this transport
};

// Called by one thread at a time, and never waits. Of each peer there is one channel at most.
class PeerConnector {
 public:
  virtual ~PeerConnector() = default;
  // Asks for a channel to `peer`; take() gives it, or says why there is none.
  virtual void request(int peer) = 0;
  // What has arrived since the last call. Cheap when nothing has.
  virtual std::vector<ConnectResult> take() = 0;
  // Readable while take() has something to give.
  virtual int descriptor() const = 0;
  // Accepts and dials no further peer; take() returns the results until then.
  virtual void close() noexcept = 0;
};

}  // namespace pycomm
