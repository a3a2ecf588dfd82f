// Connects the ranks of a group: dials peers, accepts connections and runs the handshake, until
// each pair of ranks shares one channel. No input is trusted before the handshake. Pending
// connections are bounded, so that unauthenticated clients cannot block it.
//
// If two ranks dial each other at the same time, the connection that the lower rank opened wins:
// while it dials, it declines the higher rank, and the higher rank accepts. Both use a connection
// only after it was accepted.
//
// It does not decide which rank dials which, nor when, and it has no threads. Called by mesh.cpp
// while a group forms and by on_demand_connector.h of a large group, by one thread at a time.
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

namespace pycomm {

class Connector {
 public:
  // How a peer is reached: no transport means not by a socket.
  struct PeerAddress {
    SocketTransport* transport = nullptr;
    std::vector<std::string> candidates;  // addresses, tried in turn
    std::string name;                     // "rank 2 (host a, pid 77)"
    bool encrypted = false;               // the channel is; both ends say the same
  };
  struct Options {
    int rank = 0;
    std::string key;       // for the handshakes
    std::string context;   // what is unique to the group
    std::string agreed{};  // what all ranks must know alike: HandshakeParams::agreed
    std::vector<std::unique_ptr<SocketTransport>> transports;
    std::vector<PeerAddress> addresses;  // by rank
    int failures = 100;      // attempts that failed otherwise; those that were cut off do not count
    int max_refusals = 100;  // refused calls, 50 ms apart, before a peer counts as lost
    // Whether a peer is lost at once where the system forbids connections to it. Else it is called
    // as often as one that refuses them: a rank that fails sooner removes its rank info from the
    // store before all ranks have read it.
    bool forbidden_is_final = false;
    std::function<void(const std::string&)> log;  // a line for each that failed; may be empty
  };

  explicit Connector(Options options);

  // Dials `peer` until it is connected. A second call has no effect. `reports_lost`: a peer that
  // cannot be reached is reported as lost.
  void dial(int peer, bool reports_lost = true);
  // Waits until something happens, here or on the descriptors of `also`, and for at most `limit`;
  // handles it, and returns the peers that it has connected or lost.
  std::vector<ConnectResult> poll(std::chrono::nanoseconds limit, std::vector<pollfd>& also);
  // Of a peer that is still called: " at <address> (last failure: <why>)".
  std::string failure(int peer) const;
  const SocketTransport& transport(int peer) const { return *address_of(peer).transport; }

 private:
  struct Dial {  // a peer that this rank dials
    std::unique_ptr<Handshake> handshake{};
    Handshake::Step step = Handshake::Step::want_write;
    Clock::time_point retry_at{};
    size_t candidate = 0;
    int failures = 0, refused = 0;
    bool reports_lost = true;
    bool forbidden = false;  // by the system: it is not called again
    std::string why{};
  };
  struct PendingConnection {  // accepted, in its handshake
    SocketTransport* transport;
    Handshake handshake;
    uint64_t source;
    Handshake::Step step = Handshake::Step::want_read;
  };
  struct PendingExchange {  // a connected peer whose memory is awaited
    int peer;
    Fd fd;
    Session session;
  };

  Handshake make_handshake(Fd fd, int peer, SocketTransport* by);
  bool is_wanted(int peer, const SocketTransport* by) const;
  void start_dials();
  void failed(int peer, Dial& dial, const std::string& why);
  void wait(std::chrono::nanoseconds limit, std::vector<pollfd>& also);
  void accept();
  void evict();
  bool advance(PendingConnection& connection);
  void advance_dials();
  void advance_pending();
  void reject(int peer, const std::string& why);
  void add_connection(int peer, Handshake& handshake, bool called);
  void exchange();
  const PeerAddress& address_of(int peer) const {
    return options_.addresses[static_cast<size_t>(peer)];
  }

  Options options_;
  std::vector<bool> connected_;  // by rank
  std::map<int, Dial> dials_;
  std::list<PendingConnection> pending_;
  std::list<PendingExchange> exchanges_;
  std::vector<ConnectResult> results_;
  bool out_of_descriptors_ = false;
  const size_t max_pending_ = max_pending();
  std::minstd_rand random_ = eviction_random();
};

}  // namespace pycomm
