#include "engine/plan_task.h"

#include <algorithm>
#include <cstring>

namespace pycomm::engine {
namespace {

// Maximum bytes of one step, so that sending and receiving alternate.
constexpr size_t kStepBytes = size_t{64} << 10;

}  // namespace

PlanTask::PlanTask(const PeerTable& peers, FrameDispatcher& dispatcher, const Job& job,
                   transport::Bytes scratch)
    : peers_(peers),
      dispatcher_(dispatcher),
      job_(job),
      header_(job.header),
      rank_(peers.rank()),
      scratch_(scratch.data()) {
  skip();
}

const std::byte* PlanTask::address_of(const collectives::Range& range) const {
  size_t begin = range.begin;
  if (range.space == collectives::Space::scratch) return scratch_ + begin * job_.element_bytes;
  if (job_.piece != 0) begin = begin / job_.piece * job_.stride + begin % job_.piece;
  const std::byte* base = range.space == collectives::Space::input ? job_.input : job_.output;
  return base + begin * job_.element_bytes;
}

std::byte* PlanTask::address_of_output(const collectives::Range& range) const {
  check(range.space != collectives::Space::input, "a plan writes to its input");
  return const_cast<std::byte*>(address_of(range));
}

// Each cursor skips the moves of the other; the receiving cursor executes local moves.
void PlanTask::skip() {
  while (sending_ < end() &&
         (move(sending_).to == collectives::kNoRank || move(sending_).to == rank_))
    ++sending_;
  while (receiving_ < end() && move(receiving_).from == collectives::kNoRank) ++receiving_;
}

int PlanTask::sending_to() const { return may_send() ? move(sending_).to : collectives::kNoRank; }

// kNoRank while the target range is not free yet: then the task waits for an earlier send.
int PlanTask::receiving_from() const {
  if (!may_receive() || needs(receiving_).receive_after >= static_cast<int>(sending_))
    return collectives::kNoRank;
  return move(receiving_).from != rank_ ? move(receiving_).from : collectives::kNoRank;
}

size_t PlanTask::receiving_bytes() const {
  return may_receive() ? bytes(move(receiving_).in) - received_ : 0;
}

// Whether the first `upto` bytes of the sending move are available.
bool PlanTask::sendable(size_t upto) const {
  const Needs& need = needs(sending_);
  const auto after = static_cast<size_t>(need.send_after);
  if (need.send_after < 0 || after < receiving_) return true;
  return after == receiving_ && need.streams && received_ >= upto;
}

bool PlanTask::send_step() {
  if (!may_send()) return false;
  const collectives::Move& now = move(sending_);
  const size_t total = bytes(now.out);
  if (frame_ == nullptr) {
    const size_t frame = std::min(transport::kSegmentBytes, total - sent_);
    if (!sendable(sent_ + frame)) return false;
    header_.bytes = static_cast<uint32_t>(frame);
    if (!job_.peer_counts.empty()) header_.count = job_.peer_counts[static_cast<size_t>(now.to)];
    const size_t next = std::min(sent_ + frame + transport::kSegmentBytes, total);
    const bool more = sent_ + frame < total && sendable(next);
    const transport::ConstBytes payload{total > 0 ? address_of(now.out) + sent_ : nullptr, frame};
    frame_ = dispatcher_.begin(now.to, header_, payload, more);
    if (frame_ == nullptr) return false;
  }
  const size_t pushed = frame_->push();
  if (!frame_->idle()) return pushed > 0;
  frame_ = nullptr;
  sent_ += header_.bytes;
  if (sent_ == total) {
    sent_ = 0;
    ++sending_;
    skip();
  }
  return true;
}

bool PlanTask::receive_step() {
  if (!may_receive()) return false;
  const collectives::Move& now = move(receiving_);
  if (needs(receiving_).receive_after >= static_cast<int>(sending_)) return false;
  if (now.from == rank_) {
    do_locally(now);
  } else {
    Link* link = dispatcher_.incoming(now.from);
    if (link == nullptr) return false;
    const size_t before = received_;
    if (link->payload_left() > 0 && !receive_payload(*link, now)) return false;
    if (link->payload_left() > 0) return received_ > before;
    link->finish();
    if (received_ < bytes(now.in)) return true;
  }
  received_ = 0;
  ++receiving_;
  skip();
  return true;
}

// Takes some payload of the frame at the front. False if less than one element has arrived.
bool PlanTask::receive_payload(Link& link, const collectives::Move& now) {
  peers_.require_valid(now.from, received_ + link.payload_left() <= bytes(now.in),
                       "a frame is longer than the plan says");
  std::byte* into = address_of_output(now.in) + received_;
  if (now.combine == collectives::Combine::copy) {
    const size_t n = link.receive({into, std::min(link.payload_left(), kStepBytes)});
    received_ += n;
    return n > 0;
  }
  peers_.require_valid(now.from, link.payload_left() % job_.element_bytes == 0,
                       "a frame ends inside an element");
  const transport::ConstBytes here = link.peek();
  const size_t count = std::min(here.size(), kStepBytes) / job_.element_bytes;
  if (count == 0) return false;
  const std::byte* with = address_of(now.with) + received_;
  const auto size = static_cast<int>(job_.size);
  if (now.combine == collectives::Combine::finish)
    job_.reducer->finish(into, with, here.data(), count, size);
  else
    job_.reducer->reduce(into, with, here.data(), count);
  link.take(count * job_.element_bytes);
  received_ += count * job_.element_bytes;
  return true;
}

void PlanTask::do_locally(const collectives::Move& now) const {
  if (now.in.count == 0) return;
  std::byte* into = address_of_output(now.in);
  const std::byte* arrived = address_of(now.out);
  switch (now.combine) {
    case collectives::Combine::copy:
      if (now.out.count == 0)
        std::memset(into, 0, bytes(now.in));
      else if (into != arrived)
        std::memmove(into, arrived, bytes(now.in));
      return;
    case collectives::Combine::reduce:
      return job_.reducer->reduce(into, address_of(now.with), arrived, now.in.count);
    case collectives::Combine::finish:
      return job_.reducer->finish(into, address_of(now.with), arrived, now.in.count, job_.size);
    case collectives::Combine::fold:
      return job_.reducer->fold(into, arrived, now.in.count,
                                static_cast<int>(now.out.count / now.in.count));
  }
}

}  // namespace pycomm::engine
