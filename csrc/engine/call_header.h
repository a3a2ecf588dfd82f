// What the header of a frame says about the call that it belongs to.
#pragma once

#include <string>

#include "core/operation.h"
#include "transport/frame.h"

namespace pycomm::engine {

// Whether two headers describe the same call.
bool same_call(const transport::Header& a, const transport::Header& b);

// The order of a frame's call relative to this one: -1 earlier, 0 the same, 1 later. Both counters
// may wrap around.
inline int order(const transport::Header& frame, uint16_t epoch, uint32_t sequence) {
  if (const auto d = static_cast<int16_t>(frame.epoch - epoch); d != 0) return d < 0 ? -1 : 1;
  const auto d = static_cast<int32_t>(frame.sequence - sequence);
  return d == 0 ? 0 : d < 0 ? -1 : 1;
}

// The call that a header describes: "all_reduce(float32, count 10, sum, ring)".
std::string describe(const transport::Header& header);
// The call state of its sender: "inside call 3, all_reduce(float32, count 10, sum, ring)".
std::string describe_activity(const transport::Header& header);

// Whether a message is the receiver's answer to an announcement.
inline bool is_answer(const transport::Header& message) {
  return message.operation == static_cast<uint8_t>(Operation::recv);
}

// Whether a frame belongs to a message.
inline bool is_message(const transport::Header& header) {
  return header.operation == static_cast<uint8_t>(Operation::send) || is_answer(header);
}

// Whether a message announces or answers one between devices, without a payload. A receive into
// host memory also answers an announcement.
inline bool is_agreement(const transport::Header& message) {
  return is_answer(message) || (message.algorithm & transport::kOnDevice) != 0;
}

// The answer of a receive with this `signature` to an announcement.
inline transport::Header answer_of(transport::Header signature) {
  signature.operation = static_cast<uint8_t>(Operation::recv);
  return signature;
}

}  // namespace pycomm::engine
