// The tasks of messages: one to send, one to receive, and an exchange of several.
#pragma once

#include <deque>
#include <optional>

#include "engine/frame_dispatcher.h"
#include "engine/frame_sender.h"
#include "engine/mailbox.h"
#include "engine/task.h"

namespace pycomm::engine {

class SendMessage final : public Task {
 public:
  SendMessage(FrameSender& sender, int to, const transport::Header& header,
              transport::ConstBytes bytes)
      : sender_(sender), to_(to), header_(header), bytes_(bytes) {}
  bool advance() override;
  bool done() const override { return done_; }
  int sending_to() const override { return to_; }
  int receiving_from() const override { return collectives::kNoRank; }

 private:
  FrameSender& sender_;
  int to_;
  transport::Header header_;
  transport::ConstBytes bytes_;
  size_t sent_ = 0;
  bool frame_open_ = false, done_ = false;
};

class ReceiveMessage final : public Task {
 public:
  ReceiveMessage(FrameDispatcher& dispatcher, int from, const transport::Header& wanted)
      : dispatcher_(dispatcher), from_(from), wanted_(wanted) {}
  bool advance() override;
  bool done() const override { return message_.has_value(); }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override { return from_ == kAnyPeer ? collectives::kNoRank : from_; }
  Message& message() { return *message_; }
  int sender() const { return from_; }  // after done()

 private:
  FrameDispatcher& dispatcher_;
  int from_;
  transport::Header wanted_;
  std::optional<Message> message_;
};

// Sends messages to peers while the mailbox receives the awaited ones.
class ExchangeMessages final : public Task {
 public:
  ExchangeMessages(FrameSender& sender, FrameDispatcher& dispatcher, Mailbox& mailbox)
      : sender_(sender), dispatcher_(dispatcher), mailbox_(mailbox) {}
  void send(int to, const transport::Header& header, transport::ConstBytes bytes) {
    sends_.emplace_back(sender_, to, header, bytes);
  }
  bool advance() override;
  bool done() const override {
    return sending_to() == collectives::kNoRank && mailbox_.awaited_peer() == collectives::kNoRank;
  }
  int sending_to() const override;
  int receiving_from() const override { return mailbox_.awaited_peer(); }

 private:
  FrameSender& sender_;
  FrameDispatcher& dispatcher_;
  Mailbox& mailbox_;
  std::deque<SendMessage> sends_;
};

}  // namespace pycomm::engine
