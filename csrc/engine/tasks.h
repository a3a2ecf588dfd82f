// The tasks of an engine: a plan, one message to send, one to receive, and an exchange of messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "engine/engine.h"

namespace pycomm {

// Executes a plan. One cursor sends and one receives, both in the order of the moves. Received data
// is reduced as it arrives. Data that depends on it is forwarded frame by frame.
class PlanTask final : public Task {
 public:
  PlanTask(Engine& engine, const PlanJob& job, const Header& header);
  bool advance() override { return static_cast<int>(send_step()) + receive_step() > 0; }
  bool done() const override { return sending_ == end() && receiving_ == end(); }
  int sending_to() const override;
  int receiving_from() const override;
  size_t receiving_bytes() const override;

  // Moves from index `end` on wait until a later call allows them, because their input is not ready
  // yet. Without a call all are allowed.
  void allow(size_t end) { allowed_ = end; }
  // All moves below this index are complete.
  size_t passed() const { return std::min(sending_, receiving_); }

 private:
  bool may_send() const { return sending_ < std::min(end(), allowed_); }
  bool may_receive() const { return receiving_ < std::min(end(), allowed_); }
  size_t end() const { return job_.schedule->plan.moves.size(); }
  const Move& move(size_t i) const { return job_.schedule->plan.moves[i]; }
  const Needs& needs(size_t i) const { return job_.schedule->needs[i]; }
  const std::byte* place(const Range& range) const;
  std::byte* place_out(const Range& range) const;
  size_t bytes(const Range& range) const { return range.count * job_.element_bytes; }
  void skip();
  bool sendable(size_t upto) const;
  bool send_step();
  bool receive_step();
  bool land(Link& link, const Move& move);
  void do_locally(const Move& move) const;

  Engine& engine_;
  const PlanJob& job_;
  Header header_;
  int rank_;
  std::byte* scratch_;
  size_t allowed_ = SIZE_MAX;
  size_t sending_ = 0, receiving_ = 0;  // the two cursors
  size_t sent_ = 0, landed_ = 0;        // bytes done of the moves at the cursors
  bool frame_open_ = false;             // a frame of the sending move is partly sent
};

class SendMessage final : public Task {
 public:
  SendMessage(Engine& engine, int to, const Header& header, ConstBytes bytes)
      : engine_(engine), to_(to), header_(header), bytes_(bytes) {}
  bool advance() override;
  bool done() const override { return done_; }
  int sending_to() const override { return to_; }
  int receiving_from() const override { return kNoRank; }

 private:
  Engine& engine_;
  int to_;
  Header header_;
  ConstBytes bytes_;
  size_t sent_ = 0;
  bool frame_open_ = false, done_ = false;
};

class ReceiveMessage final : public Task {
 public:
  ReceiveMessage(Engine& engine, int from, const Header& wanted)
      : engine_(engine), from_(from), wanted_(wanted) {}
  bool advance() override;
  bool done() const override { return message_.has_value(); }
  int sending_to() const override { return kNoRank; }
  int receiving_from() const override { return from_ == kAnyPeer ? kNoRank : from_; }
  Message& message() { return *message_; }
  int sender() const { return from_; }  // after done()

 private:
  Engine& engine_;
  int from_;
  Header wanted_;
  std::optional<Message> message_;
};

// Sends messages to peers while the engine receives the awaited ones.
class ExchangeMessages final : public Task {
 public:
  explicit ExchangeMessages(Engine& engine) : engine_(engine) {}
  void send(int to, const Header& header, ConstBytes bytes) {
    sends_.emplace_back(engine_, to, header, bytes);
  }
  bool advance() override;
  bool done() const override {
    return sending_to() == kNoRank && engine_.awaited_peer() == kNoRank;
  }
  int sending_to() const override;
  int receiving_from() const override { return engine_.awaited_peer(); }

 private:
  Engine& engine_;
  std::deque<SendMessage> sends_;
};

}  // namespace pycomm
