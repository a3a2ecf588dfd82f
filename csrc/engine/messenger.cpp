#include "engine/messenger.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/message_tasks.h"

namespace pycomm::engine {

void Messenger::send(int to, const transport::Header& signature, transport::ConstBytes bytes,
                     const Deadline& deadline) {
  transport::Header header = signature;
  header.epoch = calls_.epoch();
  SendMessage task(sender_, to, header, bytes);
  runner_.run(task, {.signature = signature, .is_collective = false}, deadline);
}

bool Messenger::can_send_at_once(int to, size_t bytes) {
  const std::lock_guard turn(turn_);
  const Peer& peer = peers_.at(to);
  return bytes <= transport::kSegmentBytes && peer.link && !peer.left_reason && peer.link->idle() &&
         peer.link->channel().has_space(sizeof(transport::Header) + bytes);
}

// `signature`: the call that errors and heartbeats of this rank report.
Message Messenger::await(int& from, const transport::Header& wanted, transport::Bytes into,
                         const transport::Header& signature, const Deadline& deadline) {
  const Awaited receive{from, wanted, into};
  {
    const std::lock_guard turn(turn_);  // IdleMonitor::check_for_failures() reads it
    mailbox_.await(receive);
  }
  ReceiveMessage task(dispatcher_, {&receive, 1}, false);
  runner_.run(task, {.signature = signature, .is_collective = false}, deadline);
  from = task.sender();
  return std::move(task.message());
}

int Messenger::receive(int from, const transport::Header& signature, transport::Bytes into,
                       const Deadline& deadline) {
  const Message message = await(from, signature, into, signature, deadline);
  accept(from, message, signature, into, deadline);
  return from;
}

// A message that does not match its receive is dropped, and the other receives continue.
bool Messenger::receive_any(std::span<const Awaited> receives, Received& received,
                            const Deadline& deadline) {
  const transport::Header first = receives[received.index].signature;
  {
    const std::lock_guard turn(turn_);  // IdleMonitor::check_for_failures() reads it
    for (const Awaited& one : receives) mailbox_.await(one);
    mailbox_.keep_receives();
  }
  ReceiveMessage task(dispatcher_, receives, true);
  try {
    runner_.run(task, {.signature = first, .is_collective = false}, deadline);
  } catch (const Mismatch&) {  // no message can arrive for this one
    received.index = task.index();
    throw;
  }
  if (!task.done()) return false;
  received = {.index = task.index(), .from = task.sender()};
  const Awaited& one = receives[received.index];
  accept(received.from, task.message(), one.signature, one.into, deadline);
  return true;
}

void Messenger::accept(int from, const Message& message, const transport::Header& signature,
                       transport::Bytes into, const Deadline& deadline) {
  const bool announced = is_agreement(message.header);
  if (announced) send(from, answer_of(signature), {}, deadline);
  if (!same_call(message.header, signature))
    throw refused_receive({from, message.header, signature});
  // A receive inside a `then` may take a message that arrived in the memory of one that waits.
  const std::byte* const arrived = message.into != nullptr ? message.into : message.buffer.data();
  if (arrived != into.data() && !into.empty()) std::memcpy(into.data(), arrived, into.size());
}

// A message that does not match its receive is dropped, and the other messages continue.
void Messenger::exchange(std::span<const MessageRequest> messages, MessageProgress* progress,
                         const Deadline& deadline) {
  if (messages.empty()) return;
  (void)mailbox_.take_refused();  // of an exchange that failed
  ExchangeMessages task(sender_, dispatcher_, mailbox_, progress);
  {
    const std::lock_guard turn(turn_);  // IdleMonitor::check_for_failures() reads it
    for (size_t i = 0; i < messages.size(); ++i) {
      const MessageRequest& one = messages[i];
      transport::Header header = one.signature;
      header.epoch = calls_.epoch();
      if (one.sends)
        task.send(one.peer, header, one.out, i);
      else
        mailbox_.await({one.peer, one.signature, one.into, i});
    }
  }
  runner_.run(task, {.signature = messages.front().signature, .is_collective = false}, deadline);
  const auto refused = mailbox_.take_refused();
  for (const auto& [from, theirs, mine] : refused)
    if (is_agreement(theirs)) send(from, answer_of(mine), {}, deadline);
  if (!refused.empty()) throw refused_receive(refused.front());
}

Mismatch Messenger::refused_receive(const RefusedMessage& message) const {
  const auto& [from, theirs, mine] = message;
  return Mismatch(peers_.name(from) + " sent " + describe(theirs) + ", but " +
                      peers_.name(peers_.rank()) + " receives " + describe(answer_of(mine)) +
                      (is_agreement(theirs) ? "; no data was sent" : "; the message is dropped"),
                  {.op = "recv", .rank = peers_.rank(), .peer = from});
}

// A single call receives nothing meanwhile, so its context is not kReceivesToo.
void Messenger::announce_send(int to, const transport::Header& signature,
                              const Deadline& deadline) {
  transport::Header header = signature;
  header.context = 0;
  send(to, header, {}, deadline);
  const transport::Header wanted = answer_of(header);
  const transport::Header answer = await(to, wanted, {}, signature, deadline).header;
  if (!same_call(answer, wanted)) throw refused_send(to, signature, answer);
}

Mismatch Messenger::refused_send(int to, const transport::Header& signature,
                                 const transport::Header& answer) const {
  const std::string theirs =
      is_answer(answer)
          ? peers_.name(to) + " receives " + describe(answer)
          : peers_.name(to) + " sends this rank " + describe(answer) +
                ", and each waits for the other to receive: let one of the two receive first";
  return Mismatch(peers_.name(peers_.rank()) + " sends " + describe(signature) + ", but " + theirs +
                      "; no data was sent",
                  {.op = "send", .rank = peers_.rank(), .peer = to});
}

void Messenger::agree(std::span<const MessageRequest> messages, std::vector<size_t>& agreed,
                      const Deadline& deadline) {
  AgreeOnMessages task(sender_, dispatcher_, mailbox_);
  const auto receives_from = [&](int peer) {
    return std::ranges::any_of(
        messages, [&](const MessageRequest& one) { return one.peer == peer && !one.sends; });
  };
  {
    const std::lock_guard turn(turn_);  // IdleMonitor::check_for_failures() reads it
    for (size_t i = 0; i < messages.size(); ++i) {
      transport::Header header = messages[i].signature;
      const int peer = messages[i].peer;
      header.epoch = calls_.epoch();
      header.context = receives_from(peer) ? transport::kReceivesToo : uint16_t{0};
      if (messages[i].sends) task.send(peer, header, {});
      mailbox_.await({peer, messages[i].sends ? answer_of(header) : header, {}, i});
    }
  }
  try {
    runner_.run(task, {.signature = messages.front().signature, .is_collective = false}, deadline);
  } catch (const Mismatch&) {  // a peer is in another call
    agreed = task.agreed();
    throw;
  }
  agreed = task.agreed();
  if (task.refused().empty()) return;
  const auto& [index, theirs] = task.refused().front();
  const MessageRequest& mine = messages[index];
  if (mine.sends) throw refused_send(mine.peer, mine.signature, theirs);
  throw refused_receive({mine.peer, theirs, mine.signature});
}

}  // namespace pycomm::engine
