#include "engine/call_sequence.h"

namespace pycomm::engine {
namespace {

// The hash of the calls so far (`past`) and of `call`. The count of an all_to_all differs by rank.
uint64_t followed_by(uint64_t past, const transport::Header& call) {
  const bool to_all = call.operation == static_cast<uint8_t>(Operation::all_to_all);
  const uint64_t what = uint64_t{call.operation} | uint64_t{call.dtype} << 8 |
                        uint64_t{call.op} << 16 | uint64_t{call.algorithm} << 24 |
                        uint64_t{call.peer} << 32;
  for (const uint64_t word : {what, to_all ? 0 : call.count}) {
    past = (past ^ 0xcbf29ce484222325 ^ word) * 0x9e3779b97f4a7c15;
    past ^= past >> 32;
  }
  return past;
}

}  // namespace

transport::Header CallSequence::next_header(transport::Header signature) const {
  signature.epoch = epoch_;
  signature.sequence = sequence_;
  signature.context = static_cast<uint16_t>(past_);
  return signature;
}

void CallSequence::complete(const transport::Header& header) {
  ++sequence_;
  past_ = followed_by(past_, header);
  before_ = header;
}

void CallSequence::new_epoch() {
  ++epoch_;
  sequence_ = 0;
  past_ = 0;
  running_ = nullptr;
}

}  // namespace pycomm::engine
