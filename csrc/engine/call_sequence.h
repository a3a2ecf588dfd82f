// The position of this rank in the sequence of collective calls, which every frame carries: the
// epoch, the number of the call in it, and a hash of the calls before.
//
// A mismatch starts a new epoch: all ranks drop the calls of the old one and continue.
#pragma once

#include <span>

#include "engine/call_header.h"

namespace pycomm::engine {

class CallSequence {
 public:
  // `signature` with the position of the next call.
  transport::Header next_header(transport::Header signature) const;
  // A collective starts. `header` is next_header() of its signature and stays valid until end().
  // `peer_counts` as in Job.
  void begin(const transport::Header& header, std::span<const size_t> peer_counts) {
    running_ = &header;
    peer_counts_ = peer_counts;
  }
  // It succeeded.
  void complete(const transport::Header& header);
  // No collective runs any more.
  void end() {
    running_ = nullptr;
    peer_counts_ = {};
  }
  void new_epoch();

  uint16_t epoch() const { return epoch_; }
  uint32_t sequence() const { return sequence_; }
  // The last completed call of this epoch.
  const transport::Header& last_call() const { return last_call_; }
  // The current collective, if any.
  const transport::Header* running() const { return running_; }
  // The order of a frame's call relative to this rank's next or current one.
  int order_of(const transport::Header& frame) const { return order(frame, epoch_, sequence_); }
  // The header that the frames of `peer` must have in the current collective.
  transport::Header expected_from(int peer) const {
    transport::Header header = *running_;
    const size_t ranks = peer_counts_.size() / 2;
    if (ranks > 0) header.count = peer_counts_[ranks + static_cast<size_t>(peer)];
    return header;
  }

 private:
  uint16_t epoch_ = 0;
  uint32_t sequence_ = 0;
  uint64_t call_hash_ = 0;  // hash of this epoch's calls, sent in their frames
  transport::Header last_call_{};
  const transport::Header* running_ = nullptr;
  std::span<const size_t> peer_counts_;
};

}  // namespace pycomm::engine
