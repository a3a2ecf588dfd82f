// Distinguishes a rank that is stopped, or whose host failed, from a busy one.
//
// A busy rank sends heartbeats: inside a call between two polls of its links, and between calls
// from observe/heartbeat_thread.h, which never needs the GIL. A link gets one if nothing else was
// written for an interval, a fifth of the limit. A rank checks only the peers that it waits for,
// and only if its own progress thread has been running.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/status.h"
#include "engine/call_sequence.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class Liveness {
 public:
  // An awaited peer that sends nothing for `limit` is lost; 0: never.
  Liveness(PeerTable& peers, const CallSequence& calls, std::chrono::nanoseconds limit)
      : peers_(peers), calls_(calls), limit_(limit), states_(static_cast<size_t>(peers.size())) {}

  std::chrono::nanoseconds limit() const { return limit_; }
  std::chrono::nanoseconds interval() const { return limit_ / 5; }

  // This rank's calls, as its heartbeats report them.
  void enter_call(const transport::Header& signature) {
    own_ = signature;
    own_.sequence = calls_.sequence();
    own_.kind = transport::FrameKind::heartbeat;
    own_.context = static_cast<uint16_t>(transport::CallState::in_call);
  }
  void leave_call() { own_.context = static_cast<uint16_t>(transport::CallState::idle); }

  // A frame of a call or a heartbeat of `peer` arrived.
  void note_header(int peer, const transport::Header& header) { at(peer).last = header; }
  // The last of them.
  const std::optional<transport::Header>& last_header(int peer) const {
    return states_[static_cast<size_t>(peer)].last;
  }
  // True if bytes of `peer` arrived since the last call.
  bool note_bytes(int peer);

  // Sends a heartbeat on each idle link.
  void send(Clock::time_point now);
  // Call at least every interval(), after note_bytes() of each peer.
  void update(Clock::time_point now);
  // Throws PeerLost if `peer` has been silent for the limit.
  void check(int peer, Clock::time_point now) const;
  // The last known activity of a rank that is missing from a call.
  std::string describe_peer(int peer) const;
  // From any thread, and at most 50 ms old; without `broken` and `lost`.
  Status status() const;

 private:
  struct State {
    std::optional<transport::Header> last{};
    uint64_t bytes_received_seen = 0;
    uint64_t bytes_sent_seen = 0;
    Clock::time_point sent_at{};  // when that number last grew
  };
  State& at(int peer) { return states_[static_cast<size_t>(peer)]; }
  const State& at(int peer) const { return states_[static_cast<size_t>(peer)]; }
  void publish(Clock::time_point now);

  PeerTable& peers_;
  const CallSequence& calls_;
  std::chrono::nanoseconds limit_;
  std::vector<State> states_;
  transport::Header own_{.kind = transport::FrameKind::heartbeat};
  Clock::time_point updated_at_{};
  Clock::time_point published_at_{};
  mutable std::mutex mutex_;  // guards published_
  Status published_;
};

}  // namespace pycomm::engine
