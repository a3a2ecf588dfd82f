// The other ranks of the group: their links, whether they left, and the errors that blame them.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/errors.h"
#include "engine/link.h"
#include "engine/process_watch.h"

namespace pycomm::engine {

struct Peer {
  std::unique_ptr<Link> link{};              // null: this rank, or not connected yet
  bool requested = false;                    // a connection was requested from the connector
  std::optional<std::string> left_reason{};  // "has left the group: ...", "cannot be reached: ..."
  bool left_cleanly = false;                 // it left without an error
};

class PeerTable {
 public:
  struct Identity {
    int rank = 0;
    std::vector<std::string> names{};  // by rank
    std::vector<int64_t> pids{};       // as for ProcessWatch
  };

  // `channels` by rank; null: not connected, or this rank.
  PeerTable(Identity identity, std::vector<std::unique_ptr<transport::Channel>> channels);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  const std::string& name(int peer) const { return names_[static_cast<size_t>(peer)]; }
  Peer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<size_t>(peer)]; }
  std::span<Peer> all() { return peers_; }
  std::span<const Peer> all() const { return peers_; }
  ProcessWatch& processes() { return processes_; }

  void connect(int peer, std::unique_ptr<transport::Channel> channel);
  // It closed its connection, or its process ended and everything that it sent has arrived. Only of
  // a connected peer.
  bool has_closed(int peer) const {
    return processes_.ended(peer) || at(peer).link->channel().is_closed();
  }
  // Sends the unsent bytes of all links, for a limited time. Does not read, because peers that wait
  // for this rank read.
  void flush_all();
  void close_all() noexcept;

  // The error of a peer that left, died or violated the protocol.
  PeerLost lost(int peer) const;
  PeerLost violation(int peer, std::string_view what) const;
  // Throws PeerLost, which blames `peer`, unless what it sent is valid.
  void require_valid(int peer, bool valid, std::string_view what) const {
    if (!valid) throw violation(peer, what);
  }

 private:
  int rank_;
  std::vector<std::string> names_;
  std::vector<Peer> peers_;
  ProcessWatch processes_;
};

}  // namespace pycomm::engine
