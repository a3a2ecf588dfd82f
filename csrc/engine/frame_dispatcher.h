// Begins the frames of tasks. Reads the frames at the front of the links and decides what each one
// is: a frame of the current call, a message, a heartbeat, a notice, or a frame that must wait for
// a later call.
#pragma once

#include <optional>
#include <vector>

#include "engine/call_sequence.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/mismatch_protocol.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class FrameDispatcher {
 public:
  FrameDispatcher(PeerTable& peers, const CallSequence& calls, Mailbox& mailbox, Liveness& liveness,
                  MismatchProtocol& mismatches, bool thread_multiple)
      : peers_(peers),
        calls_(calls),
        mailbox_(mailbox),
        liveness_(liveness),
        mismatches_(mismatches),
        thread_multiple_(thread_multiple),
        fronts_(static_cast<size_t>(peers.size()), Front::nothing) {}

  // Begins a frame, whose payload must stay valid until it is sent, and returns its link. Null
  // while unsent notices precede it, or the peer is not connected yet. `more`: another frame
  // follows immediately.
  Link* begin(int peer, const transport::Header& header, transport::ConstBytes payload,
              bool more = false);
  // The link to `peer` if the frame at its front belongs to the current call, else null. Handles
  // the frames in front of it that belong to no call.
  Link* incoming(int peer);
  // The epoch of the frames that begin now.
  uint16_t epoch() const { return calls_.epoch(); }
  // Handles the received frames of a peer, which may be unconnected, until one that belongs to a
  // call is at the front.
  void poll(int peer) { (void)poll_link(peer); }
  // Mailbox::take(), after it polled the sender if necessary. With thread_multiple it sets aside
  // the frames of collectives in front of the message: the peer may send both at once.
  std::optional<Message> take_message(Awaited& receive);
  // Throws Mismatch if no message for `wanted` can arrive, because unreceived messages before it
  // fill kMaxBufferedBytes.
  void check_arrives(int from, const transport::Header& wanted) const;

  // Whether the frame at the front must stay there: bytes that arrive behind it are no progress.
  // `awaited`: the current task waits for the peer.
  bool must_wait(int peer, bool awaited) const;
  // Throws if a task cannot complete because the peer that it receives from, or sends to, left. A
  // peer that left cleanly is an error only for a rank that still needs data from it or for it.
  void check_peers_needed(int from, int to);

  // The header of the frame at the front, if it arrived completely. An invalid one is a protocol
  // error of its sender.
  const transport::Header* front(int peer);
  // The same after it took the heartbeats in front of it.
  const transport::Header* front_behind_heartbeats(int peer);
  // Handles the goodbye or mismatch at the front, once it arrived completely.
  void read_notice(int peer, const transport::Header& header);
  // `peer` closed its connection: throws the error in its goodbye message, which may follow frames
  // that no call will read any more.
  [[noreturn]] void throw_peer_error(int peer);

 private:
  // The frame at the front of a link: none, one of the current call, or one for a later call.
  enum class Front { nothing, ours, later };

  Front& front_of(int peer) { return fronts_[static_cast<size_t>(peer)]; }
  Front front_of(int peer) const { return fronts_[static_cast<size_t>(peer)]; }
  Front poll_link(int peer);
  Front dispatch_frame(int peer, const transport::Header& header);
  Front dispatch_data(int peer, const transport::Header& header);
  void check_is_current(int peer, const transport::Header& header);
  Link* incoming_aside(int peer);
  bool sets_aside(int peer);
  void take_heartbeat(int peer, const transport::Header& header);
  bool contradicts_call(const transport::Header& heartbeat) const;
  bool may_end_message(int peer) const;
  bool has_notice(int peer) const;

  PeerTable& peers_;
  const CallSequence& calls_;
  Mailbox& mailbox_;
  Liveness& liveness_;
  MismatchProtocol& mismatches_;
  const bool thread_multiple_;
  std::vector<Front> fronts_;  // by rank, at the last poll
};

}  // namespace pycomm::engine
