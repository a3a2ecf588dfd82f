// Ends a call on all ranks when two ranks made different calls.
//
// A rank that detects the mismatch notifies all others, and every rank forwards the notice before
// it drops the old epoch. A rank that waits for a peer which aborted the call therefore receives
// the notice on the link that it reads.
#pragma once

#include <string>

#include "engine/call_sequence.h"
#include "engine/mailbox.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class MismatchProtocol {
 public:
  MismatchProtocol(PeerTable& peers, CallSequence& calls, Mailbox& mailbox)
      : peers_(peers), calls_(calls), mailbox_(mailbox) {}

  // The current call of `peer` is a different one: ends it on every rank with Mismatch.
  [[noreturn]] void throw_mismatch(int peer, const transport::Header& theirs);
  // The same if the peer continued with the call `theirs`, or this rank already completed it.
  [[noreturn]] void throw_mismatch_on_end(int peer, const transport::Header& theirs);
  // The same if both make the same call but made different calls before it.
  [[noreturn]] void throw_mismatch_before(int peer);
  // The same for a call of this epoch that some ranks completed, with `text` as the error text.
  [[noreturn]] void abort_call(int peer, uint32_t sequence, const std::string& text);

  // A received notice. Throws Mismatch, unless this rank has detected the mismatch itself.
  void receive(int peer, const transport::Header& notice, const std::string& text);

 private:
  void new_epoch(const transport::Header& notice, const std::string& text);

  PeerTable& peers_;
  CallSequence& calls_;
  Mailbox& mailbox_;
};

}  // namespace pycomm::engine
