// Channels that fail on purpose, as a list of faults says: for tests of everything above them.
//
// A fault strikes once so many bytes of frames have passed, both ways together, on the channels of
// one rank; it knows of frames only where one ends and to which operation it belongs. Put around
// the channels of a group by group/connect.cpp where its options name faults.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace pycomm {

enum class FaultAction : uint8_t {
  cut,      // the channels are gone, as when their process is
  kill,     // SIGKILL to this process
  stop,     // SIGSTOP to this process
  delay,    // from now on what arrives is there `delay` later
  trickle,  // from now on what arrives is seen `grain` bytes at a time
  garbage,  // 32 bytes of noise go out in front of each channel's next frame
};

inline constexpr std::array<std::string_view, 6> kFaultActions{"disconnect", "kill",     "stop",
                                                               "delay",      "throttle", "corrupt"};

struct Fault {
  FaultAction action = FaultAction::cut;
  int operation = -1;  // count data frames with this number only; -1: everything
  uint64_t after_bytes = 0;
  int peer = -1;  // count and strike on the channel to this rank only; -1: on all
  std::chrono::nanoseconds delay{0};
  size_t grain = 1;
  std::string moment_file{};  // told when it struck, in seconds of the steady clock; empty: none
};

// What the channels of one rank share: how far each fault is.
class Faults;
std::shared_ptr<Faults> make_faults(const std::vector<Fault>& faults);

// `inner`, the channel to `peer`, with these faults. Like all channels of one rank it is used by
// one thread at a time.
std::unique_ptr<Channel> make_faulty(std::unique_ptr<Channel> inner, int peer,
                                     std::shared_ptr<Faults> faults);

}  // namespace pycomm
