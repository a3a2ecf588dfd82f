#include "engine/frame_sender.h"

namespace pycomm::engine {

bool FrameSender::open(int peer, const transport::Header& header, transport::ConstBytes payload,
                       bool more) {
  const Peer& state = peers_.at(peer);
  if (!state.link) connections_.request(peer);
  if (!state.link || state.left_reason) return false;
  // A rank that only sends would not detect it otherwise.
  if (peers_.has_closed(peer)) dispatcher_.throw_peer_error(peer);
  if (!state.link->idle() && !state.link->flush()) return false;
  state.link->begin(header, payload, more);
  return true;
}

}  // namespace pycomm::engine
