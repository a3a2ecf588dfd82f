// What a rank of a group knows of itself and its peers, without communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycomm {

struct Status {
  struct Peer {
    bool connected = false;
    std::string left_reason{};   // why it left or was lost; empty: it did not
    double last_seen_s = 0;      // since bytes of it arrived
    std::string current_call{};  // according to its last frame; empty: unknown
    uint64_t bytes_written = 0, bytes_received = 0;
  };
  std::string current_call{};  // this rank's last call; empty before the first
  std::string broken{};        // why the group broke; `peers` is then frozen
  std::vector<Peer> peers{};   // by rank; default values for this rank
  // Of a broken group: the ranks that this rank knew to be lost when it broke. They died, were
  // silent for too long or left cleanly.
  std::vector<int> lost{};
};

}  // namespace pycomm
