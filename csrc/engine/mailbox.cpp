#include "engine/mailbox.h"

#include <utility>

#include "core/dtype.h"

namespace pycomm::engine {
namespace {

// More than the memory of any machine, and small enough that no sum overflows.
constexpr size_t kMostMessageBytes = size_t{1} << 48;
// Smaller messages are copied from a buffer faster than the receives that wait are looked through.
constexpr size_t kLeastDirectBytes = size_t{64} << 10;
// Reads of one payload per poll, before other peers have their turn.
constexpr int kReadsPerPoll = 16;

// Whether a receive for `wanted` takes the message; dtype and count may still differ. A rank that
// waits for an answer also takes an announcement of the same peer, unless one of them receives too:
// otherwise neither would answer.
bool is_meant(const transport::Header& message, const transport::Header& wanted) {
  if (is_answer(wanted) && is_agreement(message) && !is_answer(message))
    return message.context != transport::kReceivesToo && wanted.context != transport::kReceivesToo;
  return message.operation == wanted.operation && message.peer == wanted.peer;
}

// The memory that an unreceived message uses.
size_t bytes_used_by(const Message& message) {
  return sizeof(Message) + (message.into == nullptr ? message.bytes : 0);
}

}  // namespace

std::vector<int> Mailbox::announced_to() const {
  std::vector<int> peers;
  for (const Awaited& one : awaited_)
    if (is_answer(one.signature)) peers.push_back(one.from);
  return peers;
}

// A receive can end (on an error) before its message is complete. The received part is copied to a
// buffer, and the rest must not be written to an array that may be freed.
void Mailbox::end_receives(const Task* owner, bool keep) {
  for (const Awaited& one : awaited_) {
    if (keep || one.owner != owner) continue;
    if (one.from == kAnyPeer) continue;  // messages from any peer are buffered first
    for (Message& message : at(one.from).messages)
      if (message.into == one.into.data()) detach(message, at(one.from));
  }
  std::erase_if(awaited_, [&](const Awaited& one) { return one.owner == owner; });
  set_sending(owner, false);
}

void Mailbox::detach(const std::byte* into) {
  for (Inbox& inbox : inboxes_)
    for (Message& message : inbox.messages)
      if (message.into == into) detach(message, inbox);
}

void Mailbox::detach(Message& message, Inbox& inbox) {
  if (message.into == nullptr) return;
  message.buffer.assign(message.into, message.into + message.have);
  message.into = nullptr;
  inbox.buffered_bytes += message.bytes;
}

// A collective reads all messages, because its own frames arrive behind them. A rank that sends to
// this peer does too: otherwise both could stop reading. A closed connection brings no more.
bool Mailbox::has_space(int peer, const transport::Header& header) const {
  const Inbox& inbox = at(peer);
  if (inbox.buffered_bytes < kMaxBufferedBytes || calls_.running() != nullptr ||
      is_agreement(header))
    return true;
  const Message& last = inbox.messages.back();
  if (last.have < last.bytes || !peers_.at(peer).link->idle() || peers_.has_closed(peer))
    return true;
  return std::ranges::any_of(awaited_, [&](const Awaited& one) {
    return (one.from == peer || one.from == kAnyPeer) &&
           (is_meant(header, one.signature) || is_answer(one.signature));
  });
}

// A message that no receive waits for is buffered, so that its sender does not wait for a peer that
// is in another call.
void Mailbox::read(int peer, const transport::Header& header) {
  Inbox& inbox = at(peer);
  Link& link = *peers_.at(peer).link;
  const bool starts =
      inbox.messages.empty() || inbox.messages.back().have == inbox.messages.back().bytes;
  if (starts && !start(peer, header)) return link.finish();
  Message& message = inbox.messages.back();
  for (int reads = 0; link.payload_left() > 0; ++reads) {
    if (reads == kReadsPerPoll) return;
    const size_t end = message.have + link.payload_left();
    peers_.require_valid(peer, end <= message.bytes, "a message is longer than its header says");
    // Allocates for the bytes that arrive, not for the announced size.
    if (message.into == nullptr && message.buffer.size() < end) message.buffer.resize(end);
    std::byte* const into = message.into != nullptr ? message.into : message.buffer.data();
    const size_t n = link.receive({into + message.have, link.payload_left()});
    if (n == 0) return;
    message.have += n;
  }
  link.finish();
}

// Adds the message that begins with this header. False if it has an earlier epoch: one of the two
// ranks aborted it, and the other receives the error.
bool Mailbox::start(int peer, const transport::Header& header) {
  const auto require = [&](bool holds) {
    peers_.require_valid(peer, holds, "a message has an invalid header");
  };
  require(header.dtype < kDtypes.size());
  const size_t each = bytes_of(static_cast<Dtype>(header.dtype));
  const size_t bytes = is_agreement(header) ? 0 : header.count * each;
  require(header.count <= kMostMessageBytes / each && header.bytes <= bytes);
  if (is_agreement(header) && header.epoch != calls_.epoch()) return false;
  Message message{.header = header, .arrival = ++arrivals_, .bytes = bytes};
  message.into = destination_for(peer, header, bytes);
  at(peer).buffered_bytes += bytes_used_by(message);
  at(peer).messages.push_back(std::move(message));
  return true;
}

// The memory of the receive that will take a message which begins to arrive; null: a buffer.
std::byte* Mailbox::destination_for(int peer, const transport::Header& header, size_t bytes) const {
  auto found = destination_in(awaited_, peer, header);
  if (!found && bytes >= kLeastDirectBytes && waiting_)
    found = destination_in(waiting_(), peer, header);
  return found.value_or(nullptr);
}

// Null: the message does not match its receive, or a receive from any peer may take it. Nothing: no
// receive waits for it. Earlier messages belong to earlier receives.
std::optional<std::byte*> Mailbox::destination_in(std::span<const Awaited> receives, int peer,
                                                  const transport::Header& header) const {
  auto before = std::ranges::count_if(at(peer).messages,
                                      [&](const Message& m) { return is_meant(m.header, header); });
  for (const Awaited& one : receives) {
    if (!is_meant(header, one.signature)) continue;
    if (one.from == kAnyPeer) return nullptr;
    if (one.from == peer && before-- == 0)
      return same_call(header, one.signature) ? one.into.data() : nullptr;
  }
  return {};
}

std::optional<Message> Mailbox::take(Awaited& receive) {
  const transport::Header& wanted = receive.signature;
  const auto oldest = [&](int peer) {
    return std::ranges::find_if(at(peer).messages,
                                [&](const Message& m) { return is_meant(m.header, wanted); });
  };
  int chosen = collectives::kNoRank;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (receive.from != kAnyPeer && receive.from != peer) continue;
    const auto found = oldest(peer);
    if (found == at(peer).messages.end() || found->have < found->bytes) continue;
    if (chosen == collectives::kNoRank || found->arrival < oldest(chosen)->arrival) chosen = peer;
  }
  if (chosen == collectives::kNoRank) return std::nullopt;
  receive.from = chosen;
  Message message = std::move(*oldest(chosen));
  at(chosen).messages.erase(oldest(chosen));
  at(chosen).buffered_bytes -= bytes_used_by(message);
  if (message.into != nullptr && message.into != receive.into.data()) {  // of another receive
    message.buffer.assign(message.into, message.into + message.bytes);
    message.into = nullptr;
  }
  return message;
}

Mismatch Mailbox::full(int from, const transport::Header& wanted) const {
  const Inbox& inbox = at(from);
  const std::string& mine = peers_.name(peers_.rank());
  return Mismatch(peers_.name(from) + " sent " + std::to_string(inbox.messages.size()) +
                      " messages that " + mine + " has not received, the first " +
                      describe(inbox.messages.front().header) + "; they fill the buffer of " +
                      std::to_string(kMaxBufferedBytes >> 20) + " MiB per peer; none is " +
                      describe(wanted) + "; receive those first",
                  {.op = "recv", .rank = peers_.rank(), .peer = from});
}

void Mailbox::drop_agreements() {
  for (Inbox& inbox : inboxes_) {
    const auto dropped =
        std::erase_if(inbox.messages, [](const Message& m) { return is_agreement(m.header); });
    inbox.buffered_bytes -= dropped * sizeof(Message);
  }
}

}  // namespace pycomm::engine
