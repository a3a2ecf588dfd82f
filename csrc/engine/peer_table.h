// The other ranks of the group: their links, whether they left, and the errors that blame them.
//
// Missing links are connected during calls, through the connector if there is one. The sender opens
// the connection. A receiver opens it too after its first sleep without progress: without a
// connection it could not detect that the peer died.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/plan.h"
#include "core/deadline.h"
#include "core/errors.h"
#include "engine/link.h"
#include "engine/peer_connector.h"
#include "engine/process_watch.h"
#include "os/wake_event.h"

namespace pycomm::engine {

struct Peer {
  std::unique_ptr<Link> link{};              // null: this rank, or not connected yet
  bool requested = false;                    // a connection was requested from the connector
  std::optional<std::string> left_reason{};  // "has left the group: ...", "cannot be reached: ..."
  bool left_cleanly = false;                 // it left without an error
  Clock::time_point silent_since{};          // the limit of Liveness counts from here
};

// The last frame of a link: the reason why its sender left the group.
struct Goodbye {
  static constexpr uint8_t kLeftCleanly = 255;

  uint8_t kind = kLeftCleanly;  // else an ErrorKind
  int blamed = collectives::kNoRank;
  std::string text{};
};
// Whether the payload of a goodbye, as far as it arrived, says that its sender left cleanly.
inline bool is_clean_goodbye(transport::ConstBytes payload) {
  return !payload.empty() && static_cast<uint8_t>(payload[0]) == Goodbye::kLeftCleanly;
}

class PeerTable {
 public:
  struct Identity {
    int rank = 0;
    std::vector<std::string> names{};  // by rank
    std::vector<int64_t> pids{};       // as for ProcessWatch
  };

  // `channels` by rank; null: not connected, or this rank. `connector` may be null: then all links
  // exist from the start.
  PeerTable(Identity identity, std::vector<std::unique_ptr<transport::Channel>> channels,
            PeerConnector* connector);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  const std::string& name(int peer) const { return names_[static_cast<size_t>(peer)]; }
  Peer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<size_t>(peer)]; }
  std::span<Peer> all() { return peers_; }
  std::span<const Peer> all() const { return peers_; }
  ProcessWatch& processes() { return processes_; }

  // Requests a connection to the peer, unless there is one or none is possible.
  void request(int peer);
  // True if a requested peer, or another one, connected or turned out to be unreachable.
  bool accept();
  // Watches the channels: poll() it between their arm() and disarm(). Outside of ProgressLoop,
  // which first looks for what was notified, wait() for it.
  const os::WakeEvent& wake_event() const { return wake_event_; }
  // Adds the descriptor that is readable when accept() has something to do.
  void add_connector_to(std::vector<pollfd>& polled) const {
    if (connector_) polled.push_back({connector_->descriptor(), POLLIN, 0});
  }
  // Accepts and dials no further peer, except those that are connected already.
  void close_connector();
  // Throws PeerLost if no message can arrive any more, because all peers left.
  void require_any() const;
  // It closed its connection, or its process ended and everything that it sent has arrived. Only of
  // a connected peer.
  bool has_closed(int peer) const {
    return processes_.ended(peer) || at(peer).link->channel().is_closed();
  }
  // Sends a notice to all connected peers, for a limited time, and abandons what is being sent.
  // Peers that connect later receive the last notice of a mismatch.
  void notify(const transport::Header& notice, const std::string& text);
  void say_goodbye(uint16_t epoch, const Goodbye& goodbye);
  // Marks the peer as left, and throws the reason unless it left cleanly.
  void receive_goodbye(int peer, const std::string& payload);
  void close_all() noexcept;

  // The error of a peer that left, died or violated the protocol.
  PeerLost lost(int peer) const;
  PeerLost violation(int peer, std::string_view what) const;
  // Throws PeerLost, which blames `peer`, unless what it sent is valid.
  void require_valid(int peer, bool valid, std::string_view what) const {
    if (!valid) throw violation(peer, what);
  }

 private:
  void connect(int peer, std::unique_ptr<transport::Channel> channel);
  void flush_all();

  int rank_;
  std::vector<std::string> names_;
  os::WakeEvent wake_event_;  // outlives the channels of peers_
  std::vector<Peer> peers_;
  ProcessWatch processes_;
  PeerConnector* connector_;
  std::pair<transport::Header, std::string>
      mismatch_{};  // the last notice; no text: there was none
};

}  // namespace pycomm::engine
