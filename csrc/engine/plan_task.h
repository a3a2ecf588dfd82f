// The task that executes a plan over links.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/frame_dispatcher.h"
#include "engine/job.h"
#include "engine/task.h"

namespace pycomm::engine {

// One cursor sends and one receives, both in the order of the moves. Received data is reduced as it
// arrives. Data that depends on it is forwarded frame by frame.
class PlanTask final : public Task {
 public:
  // `scratch`: as many elements as the plan needs.
  PlanTask(const PeerTable& peers, FrameDispatcher& dispatcher, const Job& job,
           transport::Bytes scratch);
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
  const collectives::Move& move(size_t i) const { return job_.schedule->plan.moves[i]; }
  const Needs& needs(size_t i) const { return job_.schedule->needs[i]; }
  const std::byte* address_of(const collectives::Range& range) const;
  std::byte* address_of_output(const collectives::Range& range) const;
  size_t bytes(const collectives::Range& range) const { return range.count * job_.element_bytes; }
  void skip();
  bool sendable(size_t upto) const;
  bool send_step();
  bool receive_step();
  bool receive_payload(Link& link, const collectives::Move& move);
  void do_locally(const collectives::Move& move) const;

  const PeerTable& peers_;
  FrameDispatcher& dispatcher_;
  const Job& job_;
  transport::Header header_;
  int rank_;
  std::byte* scratch_;
  size_t allowed_ = SIZE_MAX;
  size_t sending_ = 0, receiving_ = 0;  // the two cursors
  size_t sent_ = 0, received_ = 0;      // bytes done of the moves at the cursors
  Link* frame_ = nullptr;               // of a partly sent frame of the sending move
};

}  // namespace pycomm::engine
