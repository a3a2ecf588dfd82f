// The task that executes a plan over links.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "engine/frame_dispatcher.h"
#include "engine/schedule.h"
#include "engine/task.h"
#include "kernels/kernels.h"

namespace pycomm::engine {

// One call: a plan over arrays. Element `i` of a strided space has the index
// (i / piece) * stride + i % piece in its array. piece = 0: the array is contiguous.
struct PlanJob {
  const Schedule* schedule = nullptr;
  transport::Header signature{};  // of every frame of the call; the engine sets epoch and sequence
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t element_bytes = 1;
  size_t piece = 0, stride = 0;  // 0: contiguous
  const kernels::Reducer* reducer = nullptr;
  int size = 1;  // ranks, which avg divides by
  // For calls whose header count differs by peer (else empty): by rank the count that is sent to
  // it, then by rank the count that must be received from it.
  std::span<const size_t> peer_counts{};
  size_t scratch_bytes() const { return schedule->plan.scratch * element_bytes; }
};

// One cursor sends and one receives, both in the order of the moves. Received data is reduced as it
// arrives. Data that depends on it is forwarded frame by frame.
class PlanTask final : public Task {
 public:
  // `scratch`: at least job.scratch_bytes().
  PlanTask(const PeerTable& peers, FrameDispatcher& dispatcher, const PlanJob& job,
           const transport::Header& header, transport::Bytes scratch);
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
  const PlanJob& job_;
  transport::Header header_;
  int rank_;
  std::byte* scratch_;
  size_t allowed_ = SIZE_MAX;
  size_t sending_ = 0, receiving_ = 0;  // the two cursors
  size_t sent_ = 0, received_ = 0;      // bytes done of the moves at the cursors
  Link* frame_ = nullptr;               // of a partly sent frame of the sending move
};

}  // namespace pycomm::engine
