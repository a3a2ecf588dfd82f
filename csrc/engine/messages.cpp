// Messages between two ranks: sent, received, and buffered until a receive takes them.
#include <algorithm>
#include <cstring>

#include "core/operation.h"
#include "engine/engine.h"
#include "engine/tasks.h"

namespace pycomm {
namespace {

// More than the memory of any machine, and small enough that no sum overflows.
constexpr size_t kMostMessageBytes = size_t{1} << 48;
// Reads of one payload per poll, before other peers have their turn.
constexpr int kReadsPerPoll = 16;

// The answer of a receive with this `signature` to an announcement.
Header answer_of(Header signature) {
  signature.operation = static_cast<uint8_t>(Operation::recv);
  return signature;
}

// Whether a receive for `wanted` takes the message; dtype and count may still differ. A rank that
// waits for an answer also takes an announcement of the same peer: otherwise neither would answer.
bool is_meant(const Header& message, const Header& wanted) {
  if (is_answer(wanted) && is_agreement(message) && !is_answer(message)) return true;
  return message.operation == wanted.operation && message.peer == wanted.peer;
}

}  // namespace

bool is_message(const Header& header) {
  return header.operation == static_cast<uint8_t>(Operation::send) || is_answer(header);
}

bool is_answer(const Header& message) {
  return message.operation == static_cast<uint8_t>(Operation::recv);
}

// A receive into host memory also answers an announcement.
bool is_agreement(const Header& message) {
  return is_answer(message) || (message.algorithm & kOnDevice) != 0;
}

void Engine::send(int to, const Header& signature, ConstBytes bytes, const Deadline& deadline) {
  Header header = signature;
  header.epoch = epoch_;
  SendMessage task(*this, to, header, bytes);
  guard(task, signature, deadline);
}

// `signature`: the call that errors and heartbeats of this rank report.
Message Engine::await(int& from, const Header& wanted, Bytes into, const Header& signature,
                      const Deadline& deadline) {
  {
    const std::lock_guard turn(turn_);  // check_for_failures() reads it
    awaited_ = {{from, wanted, into}};
  }
  ReceiveMessage task(*this, from, wanted);
  guard(task, signature, deadline);
  from = task.sender();
  return std::move(task.message());
}

int Engine::receive(int from, const Header& signature, Bytes into, const Deadline& deadline) {
  const Message message = await(from, signature, into, signature, deadline);
  const bool announced = is_agreement(message.header);
  if (announced) send(from, answer_of(signature), {}, deadline);
  if (!same_call(message.header, signature)) refuse({from, message.header, signature});
  if (!message.buffer.empty()) std::memcpy(into.data(), message.buffer.data(), into.size());
  return from;
}

// A message that does not match its receive is dropped, and the other messages continue.
void Engine::exchange(std::span<const MessageRequest> messages, const Deadline& deadline) {
  if (messages.empty()) return;
  refused_.clear();
  ExchangeMessages task(*this);
  {
    const std::lock_guard turn(turn_);  // check_for_failures() reads it
    for (const MessageRequest& one : messages) {
      Header header = one.signature;
      header.epoch = epoch_;
      if (one.sends)
        task.send(one.peer, header, one.out);
      else
        awaited_.push_back({one.peer, one.signature, one.into});
    }
    sending_ = task.sending_to() != kNoRank;
  }
  guard(task, messages.front().signature, deadline);
  for (const auto& [from, theirs, mine] : refused_)
    if (is_agreement(theirs)) send(from, answer_of(mine), {}, deadline);
  if (!refused_.empty()) refuse(refused_.front());
}

void Engine::refuse(const Refused& message) const {
  const auto& [from, theirs, mine] = message;
  throw Mismatch(name(from) + " sent " + describe(theirs) + ", but " + name(options_.rank) +
                     " receives " + describe(answer_of(mine)) +
                     (is_agreement(theirs) ? "; no data was sent" : "; the message is dropped"),
                 {.op = "recv", .rank = options_.rank, .peer = from});
}

bool Engine::take_awaited_messages() {
  bool took = false;
  for (auto one = awaited_.begin(); one != awaited_.end();) {
    const bool first = std::ranges::find(awaited_, one->from, &Awaited::from) == one;
    const auto message = first ? take_message(one->from, one->signature) : std::nullopt;
    if (!message) {
      ++one;
      continue;
    }
    took = true;
    if (!same_call(message->header, one->signature))
      refused_.push_back({one->from, message->header, one->signature});
    else if (!message->buffer.empty())
      std::memcpy(one->into.data(), message->buffer.data(), one->into.size());
    one = awaited_.erase(one);
  }
  return took;
}

void Engine::announce_send(int to, const Header& signature, const Deadline& deadline) {
  send(to, signature, {}, deadline);
  const Header wanted = answer_of(signature);
  const Header answer = await(to, wanted, {}, signature, deadline).header;
  if (same_call(answer, wanted)) return;
  const std::string theirs =
      is_answer(answer)
          ? name(to) + " receives " + describe(answer)
          : name(to) + " sends this rank " + describe(answer) +
                ", and each waits for the other to receive: let one of the two receive first";
  throw Mismatch(name(options_.rank) + " sends " + describe(signature) + ", but " + theirs +
                     "; no data was sent",
                 {.op = "send", .rank = options_.rank, .peer = to});
}

// Whether the message at the front of a link may be read although no receive waits for it. A
// collective reads all messages, because its own frames arrive behind them. A rank that sends to
// this peer does too: otherwise both could stop reading. A closed connection brings no more.
bool Engine::has_buffer_space(int peer, const Header& header) const {
  const PeerState& state = peers_[static_cast<size_t>(peer)];
  if (state.buffered_bytes < kMaxBufferedBytes || running_ != nullptr || is_agreement(header))
    return true;
  const Message& last = state.messages.back();
  if (last.have < last.bytes || !state.link->idle() || over(state)) return true;
  return std::ranges::any_of(awaited_, [&](const Awaited& one) {
    return (one.from == peer || one.from == kAnyPeer) &&
           (is_meant(header, one.signature) || is_answer(one.signature));
  });
}

void Engine::check_arrives(int from, const Header& wanted) {
  const PeerState& state = at(from);
  if (!state.link || state.front != Front::later || !state.link->has_front()) return;
  if (!is_message(*state.link->front())) return;
  throw Mismatch(name(from) + " sent " + std::to_string(state.messages.size()) + " messages that " +
                     name(options_.rank) + " has not received, the first " +
                     describe(state.messages.front().header) + "; they fill the buffer of " +
                     std::to_string(kMaxBufferedBytes >> 20) + " MiB per peer; none is " +
                     describe(wanted) + "; receive those first",
                 {.op = "recv", .rank = options_.rank, .peer = from});
}

// A message that no receive waits for is buffered, so that its sender does not wait for a peer that
// is in another call.
void Engine::buffer_message(int peer, const Header& header) {
  PeerState& state = at(peer);
  Link& link = *state.link;
  if (state.messages.empty() || state.messages.back().have == state.messages.back().bytes) {
    const auto require = [&](bool holds) {
      require_valid(peer, holds, "a message has an invalid header");
    };
    require(header.dtype < kDtypes.size());
    const size_t each = bytes_of(static_cast<Dtype>(header.dtype));
    const size_t bytes = is_agreement(header) ? 0 : header.count * each;
    require(header.count <= kMostMessageBytes / each && header.bytes <= bytes);
    if (is_agreement(header) && header.epoch != epoch_)
      return link.finish();  // one of the two ranks aborted it, and the other receives the error
    Message message{.header = header, .arrival = ++arrivals_, .bytes = bytes};
    message.into = destination_for(peer, header);
    state.buffered_bytes += bytes_used_by(message);
    if (message.bytes == 0) {  // complete: an empty message has no payload to wait for
      link.finish();
      state.messages.push_back(std::move(message));
      return;
    }
    state.messages.push_back(std::move(message));
  }
  Message& message = state.messages.back();
  for (int reads = 0; link.payload_left() > 0; ++reads) {
    if (reads == kReadsPerPoll) return;
    const size_t end = message.have + link.payload_left();
    require_valid(peer, end <= message.bytes, "a message is longer than its header says");
    // Allocates for the bytes that arrive, not for the announced size.
    if (message.into == nullptr && message.buffer.size() < end) message.buffer.resize(end);
    std::byte* const into = message.into != nullptr ? message.into : message.buffer.data();
    const size_t n = link.receive({into + message.have, link.payload_left()});
    if (n == 0) return;
    message.have += n;
  }
  link.finish();
}

// The buffer of the receive that will take a message which begins to arrive; null: no receive waits
// for it, or it does not match. Earlier messages belong to earlier receives.
std::byte* Engine::destination_for(int peer, const Header& header) {
  auto before = std::ranges::count_if(at(peer).messages,
                                      [&](const Message& m) { return is_meant(m.header, header); });
  for (const Awaited& one : awaited_)
    if (one.from == peer && is_meant(header, one.signature) && before-- == 0)
      return same_call(header, one.signature) ? one.into.data() : nullptr;
  return nullptr;
}

// A receive can end (on an error) before its message is complete. The received part is copied to a
// buffer, and the rest must not be written to an array that may be freed.
void Engine::detach_partial_messages() {
  for (const Awaited& one : awaited_) {
    if (one.from == kAnyPeer) continue;  // its messages are buffered first
    for (Message& message : at(one.from).messages) {
      if (message.into == nullptr || message.into != one.into.data()) continue;
      message.buffer.assign(message.into, message.into + message.have);
      message.into = nullptr;
      at(one.from).buffered_bytes += message.bytes;
    }
  }
}

std::optional<Message> Engine::take_message(int& from, const Header& wanted) {
  if (auto message = take_buffered(from, wanted)) return message;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (at(peer).link && (from == kAnyPeer || from == peer)) (void)poll_peer(peer);
  return take_buffered(from, wanted);
}

std::optional<Message> Engine::take_buffered(int& from, const Header& wanted) {
  const auto oldest = [&](int peer) {
    return std::ranges::find_if(at(peer).messages,
                                [&](const Message& m) { return is_meant(m.header, wanted); });
  };
  int chosen = kNoRank;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (from != kAnyPeer && from != peer) continue;
    const auto found = oldest(peer);
    if (found == at(peer).messages.end() || found->have < found->bytes) continue;
    if (chosen == kNoRank || found->arrival < oldest(chosen)->arrival) chosen = peer;
  }
  if (chosen == kNoRank) return std::nullopt;
  from = chosen;
  Message message = std::move(*oldest(chosen));
  at(chosen).messages.erase(oldest(chosen));
  at(chosen).buffered_bytes -= bytes_used_by(message);
  return message;
}

}  // namespace pycomm
