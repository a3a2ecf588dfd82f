#include "group/watch.h"

#include <chrono>
#include <utility>

namespace pycomm {
namespace {

// A rank that leaves in peace has seen its own part of every call end. For so long the parts of
// others may take to end after that; later it is missed.
constexpr std::chrono::seconds kGrace{2};

}  // namespace

void Watch::add(std::string what, const Deadline& deadline, std::shared_ptr<Event> over) {
  const std::lock_guard lock(mutex_);
  under_way_.push_back({std::move(what), deadline, std::move(over)});
}

bool Watch::idle() {
  const std::lock_guard lock(mutex_);
  return under_way_.empty();
}

std::optional<Error> Watch::look() {
  const std::lock_guard lock(mutex_);
  while (!under_way_.empty() && under_way_.front().over->passed()) under_way_.pop_front();
  const NcclResult state = communicator_ ? communicator_->state() : NcclResult::success;
  if (under_way_.empty()) {
    missed_ = {};
    return std::nullopt;  // an error of NCCL's ends the next call
  }
  const Entry& oldest = under_way_.front();
  if (state != NcclResult::success && state != NcclResult::in_progress) {
    const Error error = communicator_->error_of(oldest.what, state);
    return Error(error.kind(), error.what(), fields(oldest, -1));
  }
  if (auto error = lost(oldest)) return error;
  if (!oldest.deadline.expired()) return std::nullopt;
  return Timeout(oldest.what + " was enqueued and is not over on the device after " +
                     std::to_string(oldest.deadline.limit_s()) +
                     " s: a device hangs, or what comes before the call on some rank's stream",
                 fields(oldest, -1));
}

std::optional<Error> Watch::lost(const Entry& oldest) {
  const Status now = host_.status();
  for (int peer = 0; peer < static_cast<int>(now.peers.size()); ++peer) {
    const Status::Peer& seen = now.peers[static_cast<size_t>(peer)];
    const bool never_met = seen.departed.empty() && seen.bytes_received == 0;
    if (peer == host_.rank() || seen.connected || never_met) continue;
    if (missed_ == Clock::time_point{}) missed_ = Clock::now();
    if (Clock::now() - missed_ < kGrace) return std::nullopt;
    const Member& who = host_.members()[static_cast<size_t>(peer)];
    return PeerLost(oldest.what + " waits on the device for rank " + std::to_string(peer) + " (" +
                        who.host + ", pid " + std::to_string(who.pid) + "), which " +
                        (seen.departed.empty() ? "has hung up" : seen.departed),
                    fields(oldest, peer));
  }
  return std::nullopt;
}

ErrorFields Watch::fields(const Entry& oldest, int peer) const {
  return {.op = oldest.what.substr(0, oldest.what.find('(')),
          .rank = host_.rank(),
          .peer = peer,
          .elapsed_s = oldest.deadline.elapsed_s()};
}

}  // namespace pycomm
