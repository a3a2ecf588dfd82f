#include "engine/mismatch_protocol.h"

namespace pycomm::engine {
namespace {

// Whether data flows only from the root: a rank can complete it before it received anything from
// the others.
bool is_one_way(const transport::Header& header) {
  return (header.algorithm & transport::kOnDevice) == 0 &&
         (header.operation == static_cast<uint8_t>(Operation::broadcast) ||
          header.operation == static_cast<uint8_t>(Operation::scatter));
}

std::string name_of_call(const transport::Header* running, std::string_view otherwise) {
  return std::string(running ? name_of(static_cast<Operation>(running->operation)) : otherwise);
}

}  // namespace

// User memory is still unchanged: plans write to it only after the headers of all ranks were
// checked.
void MismatchProtocol::throw_mismatch(int peer, const transport::Header& theirs) {
  const transport::Header expected = calls_.expected_from(peer);
  const std::string text =
      "ranks disagree about call " + std::to_string(calls_.sequence()) + ": " +
      peers_.name(peers_.rank()) + " called " + describe(expected) + ", " + peers_.name(peer) +
      " called " + describe(theirs) +
      (is_one_way(theirs) || is_one_way(expected) ? "; what they write is undefined"
                                                  : "; no array was changed");
  abort_call(peer, calls_.sequence(), text);
}

// The peer sent more or less data for a call than this rank expected: the two made different calls.
// It is detected after one side completed the call, which may have written its output.
void MismatchProtocol::throw_mismatch_on_end(int peer, const transport::Header& theirs) {
  const bool over = calls_.order_of(theirs) < 0;
  const uint32_t sequence = over ? theirs.sequence : calls_.sequence();
  const std::string& name = peers_.name(peer);
  const std::string mine = over ? "completed it without the data that " + name + " sent for "
                                : "called " + describe(calls_.expected_from(peer)) +
                                      " and waits for " + name + ", which continued with ";
  abort_call(peer, sequence,
             "ranks disagree about call " + std::to_string(sequence) + ": " +
                 peers_.name(peers_.rank()) + " " + mine + describe(theirs) +
                 "; what the call writes is undefined");
}

// A rank that missed a mismatch in a one-directional call detects it at the next receive from the
// mismatching peer.
void MismatchProtocol::throw_mismatch_before(int peer) {
  abort_call(peer, calls_.last_call().sequence,
             "ranks disagree about a call before " + describe(*calls_.running()) + ": " +
                 peers_.name(peers_.rank()) + " and " + peers_.name(peer) +
                 " made different calls; the last one here was " + describe(calls_.last_call()) +
                 "; what the call writes is undefined");
}

void MismatchProtocol::abort_call(int peer, uint32_t sequence, const std::string& text) {
  const transport::Header notice{
      .kind = transport::FrameKind::mismatch, .epoch = calls_.epoch(), .sequence = sequence};
  const ErrorFields fields{.op = name_of_call(calls_.running(), "recv"),
                           .sequence = sequence,
                           .rank = peers_.rank(),
                           .peer = peer};
  new_epoch(notice, text);
  throw Mismatch(text, fields);
}

void MismatchProtocol::receive(int peer, const transport::Header& notice, const std::string& text) {
  if (notice.epoch != calls_.epoch()) return;
  const ErrorFields fields{.op = name_of_call(calls_.running(), ""),
                           .sequence = calls_.sequence(),
                           .rank = peers_.rank(),
                           .peer = peer};
  new_epoch(notice, text);
  throw Mismatch(text, fields);
}

void MismatchProtocol::new_epoch(const transport::Header& notice, const std::string& text) {
  calls_.new_epoch();
  mailbox_.drop_agreements();
  peers_.notify(notice, text);  // a partly received frame has an old epoch and is dropped
}

}  // namespace pycomm::engine
