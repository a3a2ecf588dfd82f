#include "engine/goodbye.h"

#include <cstring>

namespace pycomm::engine {
namespace {

// The payload: kind, blamed rank, text.
std::string encode(const Goodbye& goodbye) {
  const int32_t blamed = goodbye.blamed;
  std::string payload(1 + sizeof blamed, '\0');
  payload[0] = static_cast<char>(goodbye.kind);
  std::memcpy(payload.data() + 1, &blamed, sizeof blamed);
  return payload + goodbye.text;
}

}  // namespace

Goodbye goodbye_of(const Error& error) {
  return {static_cast<uint8_t>(error.kind()), error.fields().peer, error.what()};
}

void post_goodbye(PeerTable& peers, uint16_t epoch, const Goodbye& goodbye) {
  const transport::Header header{.kind = transport::FrameKind::goodbye, .epoch = epoch};
  const std::string payload = encode(goodbye);
  for (Peer& peer : peers.all()) {
    if (!peer.link) continue;
    peer.link->abandon();
    peer.link->post(header, payload);
  }
  peers.flush_all();
}

void receive_goodbye(PeerTable& peers, int peer, const std::string& payload) {
  peers.require_valid(peer, payload.size() >= 1 + sizeof(int32_t), "a goodbye is too short");
  const auto kind = static_cast<uint8_t>(payload[0]);
  int32_t blamed = collectives::kNoRank;
  std::memcpy(&blamed, payload.data() + 1, sizeof blamed);
  const std::string text = payload.substr(1 + sizeof blamed);
  peers.at(peer).left_reason = "has left the group: " + text;
  peers.at(peer).left_cleanly = kind == Goodbye::kLeftCleanly;
  if (kind == Goodbye::kLeftCleanly) return;
  const std::string reported = text + " (as " + peers.name(peer) + " reports)";
  if (kind == static_cast<uint8_t>(ErrorKind::timeout)) throw Timeout(reported, {.peer = blamed});
  if (blamed == peers.rank())
    throw PeerLost(peers.name(peer) + " considers this rank lost: " + text, {.peer = peer});
  if (kind == static_cast<uint8_t>(ErrorKind::peer_lost))
    throw PeerLost(reported, {.peer = blamed});
  throw GroupBroken(reported, {.peer = blamed == collectives::kNoRank ? peer : blamed});
}

bool is_clean_goodbye(transport::ConstBytes payload) {
  return !payload.empty() && static_cast<uint8_t>(payload[0]) == Goodbye::kLeftCleanly;
}

}  // namespace pycomm::engine
