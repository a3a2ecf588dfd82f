#include "engine/frame_dispatcher.h"

#include <algorithm>

namespace pycomm::engine {
namespace {

// Frames of one peer per poll: a peer that sends without pause delays no other.
constexpr int kFramesPerPoll = 4;

}  // namespace

Link* FrameDispatcher::begin(int peer, const transport::Header& header,
                             transport::ConstBytes payload, bool more) {
  const Peer& state = peers_.at(peer);
  if (!state.link) peers_.request(peer);
  if (!state.link || state.left_reason) return nullptr;
  if (peers_.has_closed(peer)) throw_peer_error(peer);  // a rank that only sends detects it here
  if (!state.link->idle() && !state.link->flush()) return nullptr;
  state.link->begin(header, payload, more);
  return state.link.get();
}

// A frame of a later call: the peer completed this call without sending what this rank waits for.
void FrameDispatcher::check_is_current(int peer, const transport::Header& header) {
  if (header.epoch == calls_.epoch() && header.kind == transport::FrameKind::data)
    mismatches_.throw_mismatch_on_end(peer, header);
}

// Frames that were set aside precede the others of the collective.
Link* FrameDispatcher::incoming_aside(int peer) {
  Link* const link = peers_.at(peer).link.get();
  while (const transport::Header* const header = link->front_aside()) {
    if (calls_.order_of(*header) < 0 && header->epoch != calls_.epoch()) {
      link->discard();
      continue;
    }
    const Front front = dispatch_data(peer, *header);
    if (front == Front::ours) return link;
    check_is_current(peer, *header);
    break;
  }
  return nullptr;
}

Link* FrameDispatcher::incoming(int peer) {
  if (thread_multiple_ && peers_.at(peer).link && peers_.at(peer).link->front_aside() != nullptr) {
    if (Link* const link = incoming_aside(peer)) return link;
    if (peers_.at(peer).link->front_aside() != nullptr) return nullptr;
  }
  const Front front = poll_link(peer);
  Link* link = peers_.at(peer).link.get();  // null: not connected yet
  if (front == Front::ours) return link;
  if (front != Front::later || calls_.running() == nullptr) return nullptr;
  check_is_current(peer, *link->front());
  return nullptr;
}

FrameDispatcher::Front FrameDispatcher::poll_link(int peer) {
  const Peer& state = peers_.at(peer);
  if (!state.link) return Front::nothing;
  Link& link = *state.link;
  for (int frames = 0; frames < kFramesPerPoll; ++frames) {
    const bool last =
        peers_.has_closed(peer);  // checked first: all that it sent before has arrived now
    const transport::Header* header = this->front(peer);
    const Front front = header == nullptr ? Front::nothing : dispatch_frame(peer, *header);
    front_of(peer) = front;
    const bool waits = header == nullptr || link.payload_left() > 0;
    if (front == Front::later || (front == Front::ours && !waits)) return front;
    if (!waits) continue;
    const bool cut = header == nullptr || link.peek().size() < link.payload_left();
    if (last && !state.left_reason && cut) throw peers_.lost(peer);
    return front;
  }
  return Front::nothing;
}

// Front::nothing: handled as far as it arrived.
FrameDispatcher::Front FrameDispatcher::dispatch_frame(int peer, const transport::Header& header) {
  switch (header.kind) {
    case transport::FrameKind::data:
      liveness_.note_header(peer, header);
      break;
    case transport::FrameKind::heartbeat:
      take_heartbeat(peer, header);
      if (const transport::Header& last = *liveness_.last_header(peer); contradicts_call(last))
        mismatches_.throw_mismatch(peer, last);
      return Front::nothing;
    case transport::FrameKind::mismatch:
      // A notice stays for later if it is about a later call or epoch, or, while this rank is in no
      // collective, about this epoch and would end a message that is being sent. A notice of an
      // earlier epoch must be removed.
      if (const int when = calls_.order_of(header);
          when > 0 || (calls_.running() == nullptr && header.epoch == calls_.epoch() &&
                       (when == 0 || !may_end_message(peer))))
        return Front::later;
      [[fallthrough]];
    case transport::FrameKind::goodbye:
      read_notice(peer, header);
      return Front::nothing;
  }
  if (!is_message(header)) return dispatch_data(peer, header);
  if (!mailbox_.has_space(peer, header)) return Front::later;
  mailbox_.read(peer, header);
  return Front::nothing;
}

FrameDispatcher::Front FrameDispatcher::dispatch_data(int peer, const transport::Header& header) {
  const int when = calls_.order_of(header);
  if (when < 0) {
    if (header.epoch != calls_.epoch()) {  // belongs to a call that failed
      peers_.at(peer).link->discard();
      (void)front(peer);
      return Front::nothing;
    }
    // It sent more than this rank's call received. That must not end a message in transit.
    if (calls_.running() == nullptr && !may_end_message(peer)) return Front::later;
    mismatches_.throw_mismatch_on_end(peer, header);
  }
  const transport::Header* const running = calls_.running();
  if (when > 0 || running == nullptr) return Front::later;
  if (!same_call(header, calls_.expected_from(peer))) mismatches_.throw_mismatch(peer, header);
  if (header.context != running->context) mismatches_.throw_mismatch_before(peer);
  return Front::ours;
}

// Outside of collectives: whether a mismatch of `peer` may end the messages of this rank. Not while
// another peer may accept a message that this rank announced: both must continue then.
bool FrameDispatcher::may_end_message(int peer) const {
  return mailbox_.only_awaits() && std::ranges::all_of(mailbox_.announced_to(), [&](int to) {
           return to == peer || has_notice(to);
         });
}

// Whether the frame at the front, at the last poll, is a mismatch of this epoch.
bool FrameDispatcher::has_notice(int peer) const {
  Link* const link = peers_.at(peer).link.get();
  if (link == nullptr || front_of(peer) != Front::later || !link->has_front()) return false;
  const transport::Header& header = *link->front();
  return header.kind == transport::FrameKind::mismatch && header.epoch == calls_.epoch();
}

void FrameDispatcher::take_heartbeat(int peer, const transport::Header& header) {
  peers_.require_valid(peer, header.bytes == 0, "a heartbeat has a payload");
  liveness_.note_header(peer, header);
  peers_.at(peer).link->finish();
}

// Whether the sender of the heartbeat waits in a different call than this rank. A heartbeat of an
// all_to_all does not carry the counts between the two.
bool FrameDispatcher::contradicts_call(const transport::Header& heartbeat) const {
  const transport::Header* const running = calls_.running();
  if (running == nullptr ||
      heartbeat.context != static_cast<uint16_t>(transport::CallState::in_call) ||
      is_message(heartbeat) || calls_.order_of(heartbeat) != 0)
    return false;
  const auto to_all = static_cast<uint8_t>(Operation::all_to_all);
  if (heartbeat.operation == to_all && running->operation == to_all) return false;
  return !same_call(heartbeat, *running);
}

std::optional<Message> FrameDispatcher::take_message(Awaited& receive) {
  if (auto message = mailbox_.take(receive)) return message;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (receive.from != kAnyPeer && receive.from != peer) continue;
    poll(peer);
    while (sets_aside(peer)) poll(peer);
  }
  return mailbox_.take(receive);
}

bool FrameDispatcher::sets_aside(int peer) {
  Link* const link = peers_.at(peer).link.get();
  if (!thread_multiple_ || link == nullptr || front_of(peer) == Front::nothing ||
      !link->has_front() || is_message(*link->front()) ||
      link->front()->kind != transport::FrameKind::data)
    return false;
  link->set_aside();
  front_of(peer) = Front::nothing;
  return true;
}

// With thread_multiple another thread may receive them.
void FrameDispatcher::check_arrives(int from, const transport::Header& wanted) const {
  if (thread_multiple_) return;
  Link* const link = peers_.at(from).link.get();
  if (link == nullptr || front_of(from) != Front::later || !link->has_front()) return;
  if (is_message(*link->front())) throw mailbox_.full(from, wanted);
}

bool FrameDispatcher::must_wait(int peer, bool awaited) const {
  const Front front = front_of(peer);
  return peers_.at(peer).link->has_front() &&
         (front == Front::later || (front == Front::ours && !awaited));
}

void FrameDispatcher::check_peers_needed(int from, int to) {
  // No message can follow a frame of a later call; a collective would detect the mismatch.
  if (calls_.running() == nullptr && from >= 0 && peers_.at(from).link && peers_.has_closed(from) &&
      !peers_.at(from).left_reason && peers_.at(from).link->has_front() &&
      front_of(from) == Front::later)
    throw_peer_error(from);
  for (const int peer : {from, to})
    if (peer != collectives::kNoRank && peers_.at(peer).left_reason) throw peers_.lost(peer);
}

const transport::Header* FrameDispatcher::front(int peer) {
  try {
    return peers_.at(peer).link->front();
  } catch (const PeerLost& error) {
    throw peers_.violation(peer, error.what());
  }
}

const transport::Header* FrameDispatcher::front_behind_heartbeats(int peer) {
  const transport::Header* header = front(peer);
  for (; header != nullptr && header->kind == transport::FrameKind::heartbeat; header = front(peer))
    take_heartbeat(peer, *header);
  return header;
}

void FrameDispatcher::read_notice(int peer, const transport::Header& header) {
  Link& link = *peers_.at(peer).link;
  peers_.require_valid(peer, header.bytes <= transport::kNoticeBytes, "a notice is too long");
  const transport::ConstBytes here = link.peek();
  if (here.size() < header.bytes) return;  // not complete yet
  const std::string payload(reinterpret_cast<const char*>(here.data()), here.size());
  const transport::Header notice = header;
  link.take(here.size());
  link.finish();
  if (notice.kind == transport::FrameKind::goodbye) return peers_.receive_goodbye(peer, payload);
  mismatches_.receive(peer, notice, payload);
}

void FrameDispatcher::throw_peer_error(int peer) {
  const Peer& state = peers_.at(peer);
  poll(peer);
  while (const transport::Header* header = front(peer)) {
    const bool ends_call = header->kind == transport::FrameKind::mismatch &&
                           calls_.running() != nullptr && calls_.order_of(*header) == 0;
    if (!ends_call && header->kind != transport::FrameKind::goodbye) {
      state.link->discard();
      continue;
    }
    read_notice(peer, *header);     // throws Mismatch if it ends the call
    if (!state.left_reason) break;  // it never arrived completely
  }
  throw peers_.lost(peer);
}

}  // namespace pycomm::engine
