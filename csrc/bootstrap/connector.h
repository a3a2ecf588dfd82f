// Connects the ranks of a group: dials peers, accepts connections and runs the handshake, until
// each pair of ranks shares one channel. No input is trusted before the handshake. Pending
// connections are bounded, so that unauthenticated clients cannot block it.
//
// If two ranks dial each other at the same time, the connection that the lower rank opened wins:
// while it dials, it declines the higher rank, and the higher rank accepts. Both use a connection
// only after it was accepted.
//
// It has no threads, and one thread at a time may use it. The owner decides which rank dials which,
// and when.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/peer_connector.h"
#include "transport/admission.h"
#include "transport/encrypted.h"
#include "transport/handshake.h"
#include "transport/transport.h"

namespace pycomm::bootstrap {

class Connector {
 public:
  // How to reach a peer. A null transport: not through a socket.
  struct PeerAddress {
    transport::SocketTransport* transport = nullptr;
    std::vector<std::string> candidates;  // addresses, tried in turn
    std::string name;                     // "rank 2 (host a, pid 77)"
    bool encrypted = false;               // whether the channel is; equal on both ends
  };
  struct Options {
    int rank = 0;
    std::string key;       // for the handshakes
    std::string context;   // unique to the group
    std::string agreed{};  // must be equal on all ranks: HandshakeParams::agreed
    std::vector<std::unique_ptr<transport::SocketTransport>> transports;
    std::vector<PeerAddress> addresses;  // by rank
    int max_failures = 100;              // failed dials in all; disconnects do not count
    int max_refusals = 100;              // refused dials, 50 ms apart, before a peer counts as lost
    // Whether a peer is lost immediately if the system forbids connections to it. Otherwise this
    // rank retries as for a refused connection: a rank that failed sooner would remove its rank
    // info from the store before all ranks have read it.
    bool forbidden_is_final = false;
    std::function<void(const std::string&)> log;  // one line per failed attempt; may be empty
  };

  explicit Connector(Options options);

  // Dials `peer` until it is connected. A second call has no effect. `reports_lost`: a peer that
  // cannot be reached is reported as lost.
  void dial(int peer, bool reports_lost = true);
  // Waits at most `limit` for an event here or on the descriptors of `also`. Handles it and returns
  // the peers that were connected or lost.
  std::vector<engine::ConnectResult> poll(std::chrono::nanoseconds limit,
                                          std::vector<pollfd>& also);
  // For a peer that is still dialed: " at <address> (last failure: <why>)".
  std::string failure(int peer) const;
  const transport::SocketTransport& transport(int peer) const {
    return *address_of(peer).transport;
  }

 private:
  struct Dial {  // a peer that this rank dials
    std::unique_ptr<transport::Handshake> handshake{};
    transport::Handshake::Step step = transport::Handshake::Step::want_write;
    Clock::time_point retry_at{};
    size_t candidate = 0;
    int failures = 0, refused = 0;
    bool reports_lost = true;
    bool forbidden = false;  // by the system; not dialed again
    std::string why{};
  };
  struct PendingConnection {  // accepted, in its handshake
    transport::SocketTransport* transport;
    transport::Handshake handshake;
    uint64_t source;
    transport::Handshake::Step step = transport::Handshake::Step::want_read;
  };
  struct PendingExchange {  // a connected peer that has yet to send its memory
    int peer;
    os::Fd fd;
    transport::Session session;
  };

  transport::Handshake make_handshake(os::Fd fd, int peer, transport::SocketTransport* by);
  bool is_wanted(int peer, const transport::SocketTransport* by) const;
  void start_dials();
  void failed(int peer, Dial& dial, const std::string& why);
  void wait(std::chrono::nanoseconds limit, std::vector<pollfd>& also);
  void accept();
  void evict();
  bool advance(PendingConnection& connection);
  void advance_dials();
  void advance_pending();
  void reject(int peer, const std::string& why);
  void add_connection(int peer, transport::Handshake& handshake, bool dialed);
  void exchange();
  const PeerAddress& address_of(int peer) const {
    return options_.addresses[static_cast<size_t>(peer)];
  }

  Options options_;
  std::vector<bool> connected_;  // by rank
  std::map<int, Dial> dials_;
  std::list<PendingConnection> pending_;
  std::list<PendingExchange> exchanges_;
  std::vector<engine::ConnectResult> results_;
  bool out_of_descriptors_ = false;
  transport::Admission admission_;
};

}  // namespace pycomm::bootstrap
