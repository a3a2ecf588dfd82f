// The tasks of messages: one to send, one to receive, and an exchange of several.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/message_progress.h"
#include "engine/frame_dispatcher.h"
#include "engine/frame_sender.h"
#include "engine/mailbox.h"
#include "engine/task.h"
#include "os/wake_event.h"

namespace pycomm::engine {

class SendMessage final : public Task {
 public:
  // `ready`: how many of the bytes may be sent; empty: all.
  SendMessage(FrameSender& sender, int to, const transport::Header& header,
              transport::ConstBytes bytes, std::function<size_t()> ready = {})
      : sender_(sender), to_(to), header_(header), bytes_(bytes), ready_(std::move(ready)) {}
  bool advance() override;
  bool done() const override { return done_; }
  int sending_to() const override { return to_; }
  int receiving_from() const override { return collectives::kNoRank; }

 private:
  FrameSender& sender_;
  int to_;
  transport::Header header_;
  transport::ConstBytes bytes_;
  std::function<size_t()> ready_;
  size_t sent_ = 0;
  bool frame_open_ = false, done_ = false;
};

// Waits for the message of one of several receives, which remain in order if the same message can
// complete two of them.
class ReceiveMessage final : public Task {
 public:
  // `can_be_suspended`: as in Task.
  ReceiveMessage(FrameDispatcher& dispatcher, std::span<const Awaited> receives,
                 bool can_be_suspended);
  bool advance() override;
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

 private:
  FrameDispatcher& dispatcher_;
  std::span<const Awaited> receives_;
  std::vector<size_t> first_;  // the receives that no earlier one precedes
  const bool can_be_suspended_;
  std::optional<Message> message_;
  int sender_ = collectives::kNoRank;
  size_t index_ = 0;
};

// Sends messages to peers while the mailbox receives the awaited ones.
class ExchangeMessages : public Task {
 public:
  // `progress`: null if the data of all sends is complete, and no other thread reads received data.
  ExchangeMessages(FrameSender& sender, FrameDispatcher& dispatcher, Mailbox& mailbox,
                   MessageProgress* progress = nullptr);
  ~ExchangeMessages() override;
  ExchangeMessages(const ExchangeMessages&) = delete;
  ExchangeMessages& operator=(const ExchangeMessages&) = delete;
  // `index`: as of MessageProgress.
  void send(int to, const transport::Header& header, transport::ConstBytes bytes, size_t index = 0);
  bool advance() override;
  bool done() const override {
    return sending_to() == collectives::kNoRank && mailbox_.awaited_peer() == collectives::kNoRank;
  }
  int sending_to() const override;
  int receiving_from() const override { return mailbox_.awaited_peer(); }
  void arm() override {
    if (wake_) wake_->clear();
  }
  int wake_descriptor() const override { return wake_ ? wake_->descriptor() : -1; }

 private:
  virtual void receive(const Awaited& awaited, const Message& message);

  FrameSender& sender_;
  FrameDispatcher& dispatcher_;
  Mailbox& mailbox_;
  MessageProgress* progress_;
  std::optional<os::WakeEvent> wake_;  // of progress_
  std::deque<SendMessage> sends_;
};

// Announces messages between devices, and answers those that peers announce.
class AgreeOnMessages final : public ExchangeMessages {
 public:
  using ExchangeMessages::ExchangeMessages;
  // The messages that both ends accepted, by index. For each peer, those that this rank receives
  // are in the order of its answers, and those that it sends in the order of the peer's answers.
  std::vector<size_t> agreed() const;
  // Those that one end did not accept, by index, with the message of the peer.
  const std::vector<std::pair<size_t, transport::Header>>& refused() const { return refused_; }

 private:
  void receive(const Awaited& awaited, const Message& message) override;

  std::vector<size_t> received_;
  std::vector<std::pair<uint64_t, size_t>> sent_;  // the arrival of the answer, and the index
  std::vector<std::pair<size_t, transport::Header>> refused_;
};

}  // namespace pycomm::engine
