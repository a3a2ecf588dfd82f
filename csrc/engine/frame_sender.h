// Sends the frames of tasks.
#pragma once

#include "engine/connections.h"
#include "engine/frame_dispatcher.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class FrameSender {
 public:
  FrameSender(PeerTable& peers, Connections& connections, FrameDispatcher& dispatcher)
      : peers_(peers), connections_(connections), dispatcher_(dispatcher) {}

  // Begins a frame, whose payload must stay valid until is_sent(). False while unsent notices
  // precede it, or the peer is not connected yet. `more`: another frame follows immediately.
  bool open(int peer, const transport::Header& header, transport::ConstBytes payload,
            bool more = false);
  // Sends what fits now; returns the payload bytes sent.
  size_t push(int peer) {
    const size_t n = peers_.at(peer).link->push();
    payload_sent_ += n;
    return n;
  }
  // Whether all of the frame is sent.
  bool is_sent(int peer) const { return peers_.at(peer).link->idle(); }
  uint64_t payload_sent() const { return payload_sent_; }

 private:
  PeerTable& peers_;
  Connections& connections_;
  FrameDispatcher& dispatcher_;
  uint64_t payload_sent_ = 0;
};

}  // namespace pycomm::engine
