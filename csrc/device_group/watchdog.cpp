#include "device_group/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace pycomm::device_group {
namespace {

// A rank that left cleanly saw every call complete on its side. Peers may take this long to
// complete theirs; after that the rank counts as lost.
constexpr std::chrono::seconds kGrace{2};

// Connections of the host group are polled only for calls that take longer.
constexpr std::chrono::seconds kUsualTime{1};

// The reason of a rank that aborts may arrive on the host group this long after the executor's
// error.
constexpr std::chrono::seconds kReasonTime{1};

}  // namespace

void Watchdog::add(std::string what, std::vector<int> peers, const Deadline& deadline,
                   std::shared_ptr<DeviceWork> work) {
  const std::lock_guard lock(mutex_);
  if (cause_) throw Error(*cause_);
  under_way_.push_back({std::move(what), std::move(peers), deadline, nullptr, std::move(work)});
}

void Watchdog::set_end(std::shared_ptr<device::Event> end_event) {
  const std::lock_guard lock(mutex_);
  if (cause_) throw Error(*cause_);  // the call's event passes without a result
  if (under_way_.empty()) return;
  if (end_event)
    under_way_.back().end_event = std::move(end_event);
  else
    under_way_.pop_back();
}

bool Watchdog::idle() {
  const std::lock_guard lock(mutex_);
  return under_way_.empty();
}

bool Watchdog::is_over(const device::Event& end_event) {
  const std::lock_guard lock(mutex_);
  (void)remove_passed();
  return std::ranges::none_of(
      under_way_, [&](const Entry& entry) { return entry.end_event.get() == &end_event; });
}

std::optional<Error> Watchdog::look(bool agreeing) {
  std::unique_lock lock(mutex_);
  const auto failure = remove_passed();
  if (under_way_.empty()) {
    lost_since_ = {};
    return std::nullopt;  // an error of the executor fails the next call
  }
  const Entry& oldest = under_way_.front();
  const std::chrono::duration<double> most(kReasonTime);
  if (agreeing && oldest.deadline.elapsed_s() < oldest.deadline.limit_s() + most.count())
    return std::nullopt;
  if (failure) {
    const Entry copy = oldest;
    lock.unlock();  // it waits, and is_over() may be called with Python's lock
    return with_reason(*failure, copy);
  }
  if (auto error = lost(oldest)) return error;
  if (!oldest.deadline.expired()) return std::nullopt;
  const std::string limit = std::to_string(oldest.deadline.limit_s()) + " s: ";
  if (!oldest.end_event)
    return Timeout(oldest.what + " could not be enqueued within " + limit + "a rank may be missing",
                   fields(oldest, -1));
  return Timeout(oldest.what + " was enqueued but did not complete on the device within " + limit +
                     "a device hangs, or earlier work on the stream of some rank does",
                 fields(oldest, -1));
}

Error Watchdog::error_of_last(const Error& failure) {
  std::unique_lock lock(mutex_);
  if (under_way_.empty()) return failure;  // the group ended meanwhile
  const Entry copy = under_way_.back();
  lock.unlock();  // it waits, and is_over() may be called with Python's lock
  const std::string text = copy.what + ": " + failure.what();
  return with_reason(Error(failure.kind(), text, failure.fields()), copy);
}

// An aborted call passes its event too: passed calls are complete only if the executor reports no
// error afterwards.
std::optional<Error> Watchdog::remove_passed() {
  if (under_way_.empty()) return std::nullopt;
  auto first = under_way_.begin();
  while (first != under_way_.end() && first->end_event && first->end_event->passed()) ++first;
  auto failure = async_error_(under_way_.front().what);
  if (!failure) under_way_.erase(under_way_.begin(), first);
  return failure;
}

bool Watchdog::end(const Error& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(ended_, true)) return false;
  cause_ = error;
  try {
    (void)remove_passed();
  } catch (const InternalError&) {  // the device failed: no call can complete
  }
  for (const Entry& entry : under_way_)
    if (entry.work) entry.work->fail(std::make_exception_ptr(Error(error)));
  under_way_.clear();
  return true;
}

bool Watchdog::close() noexcept {
  const std::lock_guard lock(mutex_);
  return !std::exchange(ended_, true);
}

bool Watchdog::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

std::optional<Error> Watchdog::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void Watchdog::throw_mismatch() {
  const std::lock_guard lock(mutex_);
  const bool is_mismatch = cause_ && cause_->kind() == ErrorKind::mismatch;
  if (is_mismatch && !std::exchange(mismatch_thrown_, true)) throw Error(*cause_);
}

std::optional<Error> Watchdog::lost(const Entry& oldest) {
  // A kernel of ours that waits for a lost rank reports nothing, and an idle host group finds out
  // through heartbeats only.
  if (oldest.peers.empty() && oldest.deadline.elapsed_s() >= kUsualTime.count()) {
    try {
      host_.check_for_failures({});
    } catch (const Error&) {  // now in the status
    }
  }
  const Status now = host_.status();
  if (!now.broken.empty()) {
    if (!lost_for_long()) return std::nullopt;
    return GroupBroken(
        oldest.what + " waits on the device for ranks of a group that is broken: " + now.broken,
        fields(oldest, -1));
  }
  for (int peer = 0; peer < static_cast<int>(now.peers.size()); ++peer) {
    const Status::Peer& seen = now.peers[static_cast<size_t>(peer)];
    const bool never_met = seen.left_reason.empty() && seen.bytes_received == 0;
    const bool needed = oldest.peers.empty() || std::ranges::count(oldest.peers, peer) > 0;
    if (peer == host_.rank() || !needed || seen.connected || never_met) continue;
    if (!lost_for_long()) return std::nullopt;
    const Member& who = host_.info().members[static_cast<size_t>(peer)];
    return PeerLost(
        oldest.what + " waits on the device for rank " + std::to_string(peer) + " (" + who.host +
            ", pid " + std::to_string(who.pid) + "), which " +
            (seen.left_reason.empty() ? "closed its connection unexpectedly" : seen.left_reason),
        fields(oldest, peer));
  }
  return std::nullopt;
}

// The executor's error, with the reason of the rank that aborted, if it sent one.
Error Watchdog::with_reason(const Error& failure, const Entry& oldest) {
  if (failure.kind() == ErrorKind::peer_lost) {
    try {
      host_.check_for_failures(kReasonTime);
    } catch (const Error& error) {
      return Error(error.kind(), failure.what() + std::string("; ") + error.what(),
                   fields(oldest, error.fields().peer));
    }
  }
  return Error(failure.kind(), failure.what(), fields(oldest, failure.fields().peer));
}

bool Watchdog::lost_for_long() {
  if (lost_since_ == Clock::time_point{}) lost_since_ = Clock::now();
  return Clock::now() - lost_since_ >= kGrace;
}

ErrorFields Watchdog::fields(const Entry& oldest, int peer) const {
  return {.op = oldest.what.substr(0, oldest.what.find('(')),
          .rank = host_.rank(),
          .peer = peer,
          .elapsed_s = oldest.deadline.elapsed_s()};
}

}  // namespace pycomm::device_group
