#include "engine/call_sequence.h"

namespace pycomm::engine {
namespace {

// The hash of the calls so far, extended by `call`. The count of an all_to_all differs by rank.
uint64_t next_hash(uint64_t hash, const transport::Header& call) {
  const bool to_all = call.operation == static_cast<uint8_t>(Operation::all_to_all);
  const uint64_t what = uint64_t{call.operation} | uint64_t{call.dtype} << 8 |
                        uint64_t{call.op} << 16 | uint64_t{call.algorithm} << 24 |
                        uint64_t{call.peer} << 32;
  for (const uint64_t word : {what, to_all ? 0 : call.count}) {
    hash = (hash ^ 0xcbf29ce484222325 ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

transport::Header CallSequence::next_header(transport::Header signature) const {
  signature.epoch = epoch_;
  signature.sequence = sequence_;
  signature.context = static_cast<uint16_t>(call_hash_);
  return signature;
}

void CallSequence::complete(const transport::Header& header) {
  ++sequence_;
  call_hash_ = next_hash(call_hash_, header);
  last_call_ = header;
}

void CallSequence::new_epoch() {
  ++epoch_;
  sequence_ = 0;
  call_hash_ = 0;
  running_ = nullptr;
}

}  // namespace pycomm::engine
