// Goodbye messages: the last frame of a link, with the reason why its sender left the group.
#pragma once

#include <string>

#include "collectives/plan.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

struct Goodbye {
  static constexpr uint8_t kLeftCleanly = 255;

  uint8_t kind = kLeftCleanly;  // else an ErrorKind
  int blamed = collectives::kNoRank;
  std::string text{};
};

// The goodbye of a rank that this error ended.
Goodbye goodbye_of(const Error& error);
// Sends it to all connected peers, for a limited time.
void post_goodbye(PeerTable& peers, uint16_t epoch, const Goodbye& goodbye);
// Handles the payload of a received one: marks the peer as left, and throws the reason unless it
// left cleanly.
void receive_goodbye(PeerTable& peers, int peer, const std::string& payload);
// Whether the payload of a goodbye, as far as it arrived, says that its sender left cleanly.
bool is_clean_goodbye(transport::ConstBytes payload);

}  // namespace pycomm::engine
