#include "engine/messenger.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "engine/engine.h"
#include "engine/task.h"
#include "os/wake_event.h"

namespace pycomm::engine {
namespace {

class SendMessage final : public Task {
 public:
  // `ready`: how many of the bytes may be sent; empty: all.
  SendMessage(FrameDispatcher& dispatcher, int to, const transport::Header& header,
              transport::ConstBytes bytes, std::function<size_t()> ready = {})
      : dispatcher_(dispatcher),
        to_(to),
        header_(header),
        bytes_(bytes),
        ready_(std::move(ready)) {}
  void begin() override { header_.epoch = dispatcher_.epoch(); }
  bool done() const override { return done_; }
  int sending_to() const override { return to_; }
  int receiving_from() const override { return collectives::kNoRank; }

  bool advance() override {
    if (frame_ == nullptr) {
      const size_t frame = std::min(transport::kSegmentBytes, bytes_.size() - sent_);
      if (ready_ && ready_() < sent_ + frame) return false;
      header_.bytes = static_cast<uint32_t>(frame);
      frame_ = dispatcher_.begin(to_, header_, bytes_.subspan(sent_, frame));
      if (frame_ == nullptr) return false;
    }
    const size_t pushed = frame_->push();
    if (!frame_->idle()) return pushed > 0;
    frame_ = nullptr;
    sent_ += header_.bytes;
    done_ = sent_ == bytes_.size();
    return true;
  }

 private:
  FrameDispatcher& dispatcher_;
  int to_;
  transport::Header header_;
  transport::ConstBytes bytes_;
  std::function<size_t()> ready_;
  size_t sent_ = 0;
  Link* frame_ = nullptr;  // the link of a partly sent frame
  bool done_ = false;
};

// Waits for the message of one of several receives, which remain in order if the same message can
// complete two of them.
class ReceiveMessage final : public Task {
 public:
  // `can_be_suspended`: as in Task.
  ReceiveMessage(FrameDispatcher& dispatcher, Mailbox& mailbox, std::span<const Awaited> receives,
                 bool can_be_suspended)
      : dispatcher_(dispatcher),
        mailbox_(mailbox),
        receives_(receives),
        can_be_suspended_(can_be_suspended) {}
  bool done() const override { return message_.has_value(); }
  bool can_be_suspended() const override { return can_be_suspended_; }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override {
    const int from = receives_.front().from;
    return from == kAnyPeer ? collectives::kNoRank : from;
  }
  // After done().
  Message& message() { return *message_; }
  int sender() const { return sender_; }
  size_t index() const { return index_; }  // of the receive

  void begin() override {
    for (size_t i = 0; i < receives_.size(); ++i) {
      const Awaited& one = receives_[i];
      mailbox_.await(this, one);
      const auto precedes = [&](const Awaited& other) {
        return other.signature.peer == one.signature.peer &&
               (other.from == one.from || other.from == kAnyPeer || one.from == kAnyPeer);
      };
      if (std::ranges::none_of(receives_.first(i), precedes)) first_.push_back(i);
    }
  }

  bool advance() override {
    for (const size_t i : first_) {
      Awaited receive = receives_[i];
      index_ = i;
      message_ = dispatcher_.take_message(receive);
      sender_ = receive.from;
      if (message_) return true;
      if (sender_ == kAnyPeer) continue;
      dispatcher_.check_arrives(sender_, receives_[i].signature);
      if (i > 0) dispatcher_.check_peers_needed(sender_, collectives::kNoRank);
    }
    return false;
  }

 private:
  FrameDispatcher& dispatcher_;
  Mailbox& mailbox_;
  std::span<const Awaited> receives_;
  std::vector<size_t> first_;  // the receives that no earlier one precedes
  const bool can_be_suspended_;
  std::optional<Message> message_;
  int sender_ = collectives::kNoRank;
  size_t index_ = 0;
};

// A receive and the message that did not match it.
struct Refused {
  Awaited mine;
  transport::Header theirs;
};

// Sends messages to peers while the mailbox receives the awaited ones.
class ExchangeMessages : public Task {
 public:
  // `progress`: as of Messenger::exchange().
  ExchangeMessages(FrameDispatcher& dispatcher, Mailbox& mailbox,
                   std::span<const MessageRequest> messages, MessageProgress* progress = nullptr)
      : messages_(messages), mailbox_(mailbox), dispatcher_(dispatcher), progress_(progress) {
    if (progress_ == nullptr) return;
    wake_.emplace();
    progress_->set_wake([this] { wake_->notify(); });
  }
  ~ExchangeMessages() override {
    if (progress_ != nullptr) progress_->set_wake({});
  }
  ExchangeMessages(const ExchangeMessages&) = delete;
  ExchangeMessages& operator=(const ExchangeMessages&) = delete;

  void begin() override {
    for (size_t i = 0; i < messages_.size(); ++i) {
      const MessageRequest& one = messages_[i];
      if (one.sends)
        send(one.peer, one.signature, one.out, i);
      else
        mailbox_.await(this, {one.peer, one.signature, one.into, i});
    }
  }

  // One message at a time to each peer, all peers concurrently: a slow peer delays no other.
  bool advance() override {
    bool moved = false, left = false;
    std::vector<int> busy;
    for (SendMessage& one : sends_) {
      if (one.done() || std::ranges::count(busy, one.sending_to()) > 0) continue;
      moved |= one.advance();
      if (!one.done()) busy.push_back(one.sending_to());
      left |= !one.done();
    }
    if (!left) mailbox_.set_sending(this, false);  // from now on a notice may end the exchange
    const auto take = [&](Awaited& one) { return dispatcher_.take_message(one); };
    const auto received = [&](const Awaited& one, const Message& message) {
      receive(one, message);
    };
    const bool delivered = mailbox_.deliver_awaited(this, take, received);
    if (progress_ != nullptr)
      mailbox_.report_arriving(
          [&](const Awaited& one, size_t bytes) { progress_->received(one.index, bytes); });
    return delivered || moved;
  }

  bool done() const override {
    return sending_to() == collectives::kNoRank && receiving_from() == collectives::kNoRank;
  }
  int sending_to() const override {
    for (const SendMessage& one : sends_)
      if (!one.done()) return one.sending_to();
    return collectives::kNoRank;
  }
  int receiving_from() const override { return mailbox_.awaited_peer(this); }
  void arm() override {
    if (wake_) wake_->clear();
  }
  int wake_descriptor() const override { return wake_ ? wake_->descriptor() : -1; }
  const std::vector<Refused>& refused() const { return refused_; }

 protected:
  void send(int to, transport::Header header, transport::ConstBytes bytes, size_t index = 0) {
    std::function<size_t()> ready;
    if (progress_ != nullptr) ready = [this, index] { return progress_->ready(index); };
    header.epoch = dispatcher_.epoch();
    sends_.emplace_back(dispatcher_, to, header, bytes, std::move(ready));
    mailbox_.set_sending(this, true);
  }

  std::span<const MessageRequest> messages_;
  Mailbox& mailbox_;
  FrameDispatcher& dispatcher_;
  std::vector<Refused> refused_;

 private:
  // A message that does not match its receive is dropped, and the other messages continue.
  virtual void receive(const Awaited& receive, const Message& message) {
    if (!same_call(message.header, receive.signature)) {
      refused_.push_back({receive, message.header});
      return;
    }
    if (!message.buffer.empty())
      std::memcpy(receive.into.data(), message.buffer.data(), receive.into.size());
    if (progress_ != nullptr) progress_->received(receive.index, receive.into.size());
  }

  MessageProgress* progress_;
  std::optional<os::WakeEvent> wake_;  // of progress_
  std::deque<SendMessage> sends_;
};

// Announces messages between devices, and answers those that peers announce.
class AgreeOnMessages final : public ExchangeMessages {
 public:
  using ExchangeMessages::ExchangeMessages;

  void begin() override {
    const auto receives_from = [&](int peer) {
      return std::ranges::any_of(
          messages_, [&](const MessageRequest& one) { return one.peer == peer && !one.sends; });
    };
    for (size_t i = 0; i < messages_.size(); ++i) {
      transport::Header header = messages_[i].signature;
      const int peer = messages_[i].peer;
      header.epoch = dispatcher_.epoch();
      header.context = receives_from(peer) ? transport::kReceivesToo : uint16_t{0};
      if (messages_[i].sends) send(peer, header, {});
      mailbox_.await(this, {peer, messages_[i].sends ? answer_of(header) : header, {}, i});
    }
  }

  // As of Messenger::agree().
  std::vector<size_t> agreed() const {
    std::vector<size_t> all = received_;
    auto sent = sent_;
    std::ranges::sort(sent);
    for (const auto& [arrival, index] : sent) all.push_back(index);
    return all;
  }

 private:
  // A receive is agreed when its answer is about to be sent: the peer cannot refuse it any more.
  void receive(const Awaited& awaited, const Message& message) override {
    const bool sends = is_answer(awaited.signature);
    if (!sends && is_agreement(message.header))
      send(awaited.from, answer_of(awaited.signature), {});
    if (!same_call(message.header, awaited.signature))
      refused_.push_back({awaited, message.header});
    else if (sends)
      sent_.emplace_back(message.arrival, awaited.index);
    else
      received_.push_back(awaited.index);
  }

  std::vector<size_t> received_;
  std::vector<std::pair<uint64_t, size_t>> sent_;  // the arrival of the answer, and the index
};

// What errors and heartbeats of this rank report.
transport::Header reported(const MessageRequest& one) {
  return one.sends ? one.signature : answer_of(one.signature);
}

}  // namespace

void Messenger::send(int to, const transport::Header& signature, transport::ConstBytes bytes,
                     const Deadline& deadline) {
  SendMessage task(dispatcher_, to, signature, bytes);
  engine_.run(task, signature, deadline);
}

// `signature`: the call that errors and heartbeats of this rank report.
Message Messenger::await(int& from, const transport::Header& wanted, transport::Bytes into,
                         const transport::Header& signature, const Deadline& deadline) {
  const Awaited receive{from, wanted, into};
  ReceiveMessage task(dispatcher_, mailbox_, {&receive, 1}, false);
  engine_.run(task, signature, deadline);
  from = task.sender();
  return std::move(task.message());
}

int Messenger::receive(int from, const transport::Header& signature, transport::Bytes into,
                       const Deadline& deadline) {
  const Message message = await(from, signature, into, answer_of(signature), deadline);
  accept(from, message, signature, into, deadline);
  return from;
}

// A message that does not match its receive is dropped, and the other receives continue.
bool Messenger::receive_any(std::span<const Awaited> receives, Received& received,
                            const Deadline& deadline) {
  ReceiveMessage task(dispatcher_, mailbox_, receives, true);
  try {
    engine_.run(task, answer_of(receives[received.index].signature), deadline);
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
  if (!same_call(message.header, signature)) throw refused_receive(from, message.header, signature);
  if (!message.buffer.empty()) std::memcpy(into.data(), message.buffer.data(), into.size());
}

void Messenger::exchange(std::span<const MessageRequest> messages, MessageProgress* progress,
                         const Deadline& deadline) {
  if (messages.empty()) return;
  ExchangeMessages task(dispatcher_, mailbox_, messages, progress);
  engine_.run(task, reported(messages.front()), deadline);
  for (const auto& [mine, theirs] : task.refused())
    if (is_agreement(theirs)) send(mine.from, answer_of(mine.signature), {}, deadline);
  if (task.refused().empty()) return;
  const auto& [mine, theirs] = task.refused().front();
  throw refused_receive(mine.from, theirs, mine.signature);
}

Mismatch Messenger::refused_receive(int from, const transport::Header& theirs,
                                    const transport::Header& mine) const {
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
  AgreeOnMessages task(dispatcher_, mailbox_, messages);
  try {
    engine_.run(task, reported(messages.front()), deadline);
  } catch (const Mismatch&) {  // a peer is in another call
    agreed = task.agreed();
    throw;
  }
  agreed = task.agreed();
  if (task.refused().empty()) return;
  const auto& [awaited, theirs] = task.refused().front();
  const MessageRequest& mine = messages[awaited.index];
  if (mine.sends) throw refused_send(mine.peer, mine.signature, theirs);
  throw refused_receive(mine.peer, theirs, mine.signature);
}

}  // namespace pycomm::engine
