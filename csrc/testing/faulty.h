// Fault injection: channels that fail according to a list of faults, for tests.
//
// A fault strikes after a given number of bytes, sent and received, on the channels of one rank. Of
// a frame it uses only the size and the operation.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace pycomm::testing {

enum class FaultAction : uint8_t {
  disconnect,  // the channels are closed, as when the process dies
  kill,        // SIGKILL to this process
  stop,        // SIGSTOP to this process
  delay,       // from now on received bytes are visible `delay` later
  throttle,    // from now on received bytes become visible `chunk_bytes` at a time
  corrupt,     // 32 bytes of noise are sent before each channel's next frame
};

inline constexpr std::array<std::string_view, 6> kFaultActions{"disconnect", "kill",     "stop",
                                                               "delay",      "throttle", "corrupt"};

struct Fault {
  FaultAction action = FaultAction::disconnect;
  int operation = -1;  // count only data frames of this operation; -1: everything
  uint64_t after_bytes = 0;
  int peer = -1;  // count and strike only on the channel to this rank; -1: on all
  std::chrono::nanoseconds delay{0};
  size_t chunk_bytes = 1;
  // Receives the time of the fault, in s of the steady clock; or empty.
  std::string timestamp_file{};
};

// The state of the faults, shared by the channels of one rank.
class Faults;
std::shared_ptr<Faults> make_faults(const std::vector<Fault>& faults);

// `inner`, the channel to `peer`, with these faults. All channels of one rank must be used by one
// thread at a time.
std::unique_ptr<transport::Channel> make_faulty(std::unique_ptr<transport::Channel> inner, int peer,
                                                std::shared_ptr<Faults> faults);

// make_faulty() with these faults, for a group's options.
std::function<std::unique_ptr<transport::Channel>(std::unique_ptr<transport::Channel>, int peer)>
fault_injector(const std::vector<Fault>& faults);

}  // namespace pycomm::testing
