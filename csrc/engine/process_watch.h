// Detects that the process of a peer on the same host ended.
//
// When that is detected, all that the process sent is in the kernel or in shared memory. A socket
// that another process keeps open may still deliver bytes for which this rank had no buffer space.
// A peer therefore counts as ended only when no more bytes arrive.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "core/deadline.h"
#include "os/process.h"

namespace pycomm::engine {

class ProcessWatch {
 public:
  // If a process ended and no byte of it arrived for this time, no more bytes will arrive.
  static constexpr std::chrono::milliseconds kQuiet{50};

  // `pids` by rank: as this process sees them; 0 or an empty list: not visible.
  ProcessWatch(std::vector<int64_t> pids, size_t size) : pids_(std::move(pids)), states_(size) {}

  // From when the peer is connected.
  void watch(int peer);
  // Its process ended, and no more bytes will arrive.
  bool ended(int peer) const { return states_[static_cast<size_t>(peer)].ended; }
  // A process ended, and its last bytes may still arrive.
  bool pending() const { return pending_; }
  // Call whenever bytes of the peer arrived.
  void note_bytes(int peer, Clock::time_point now) {
    if (pending_) states_[static_cast<size_t>(peer)].last_byte_at = now;
  }

  // Around a poll(2): clear(), then add() for each peer whose end is of interest; find_ended()
  // takes what add() appended. update() at any time, if pending().
  void clear() { watched_.clear(); }
  void add(int peer, std::vector<pollfd>& polled);
  void find_ended(std::span<const pollfd> polled);
  void update();
  // Looks at one process without a poll(2).
  void look(int peer);

 private:
  struct State {
    os::Process process{};             // if it is visible from this process
    Clock::time_point last_byte_at{};  // after its process ended: when bytes last arrived
    bool ended = false;
  };
  State& at(int peer) { return states_[static_cast<size_t>(peer)]; }
  void note_end(State& state);

  std::vector<int64_t> pids_;
  std::vector<State> states_;
  std::vector<int> watched_;  // those of add()
  bool pending_ = false;
};

}  // namespace pycomm::engine
