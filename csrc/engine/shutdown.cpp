#include "engine/shutdown.h"

#include <poll.h>

#include <algorithm>

namespace pycomm::engine {
namespace {

// Time to read frames that had arrived but were unread when the engine broke.
constexpr std::chrono::milliseconds kFinalPollTimeout{10};
// Much longer than a rank that waits in a call needs to answer, even on a busy machine. Together
// with the limit of PeerTable::flush_all() it is below 1 s, by which a call may exceed its timeout.
constexpr std::chrono::milliseconds kLivenessTimeout{400};

Goodbye goodbye_of(const Error& error) {
  return {static_cast<uint8_t>(error.kind()), error.fields().peer, error.what()};
}

}  // namespace

std::string Shutdown::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

std::vector<int> Shutdown::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Shutdown::throw_broken() const {
  throw GroupBroken("this group cannot be used any more: " + cause(), {.rank = peers_.rank()});
}

void Shutdown::leave(std::chrono::nanoseconds wait,
                     const std::function<bool()>& interrupted) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load(std::memory_order_relaxed)) return;
    cause_ = "it was closed";
    broken_.store(true, std::memory_order_release);
  }
  say_goodbye({.text = "it closed the group"}, wait, interrupted);
}

// Holds the lock while it finds the lost ranks, so that lost() is complete once the cause is known.
void Shutdown::fail(const Error& error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (broken_.load(std::memory_order_relaxed)) return;
    cause_ = error.what();
    broken_.store(true, std::memory_order_release);
    try {
      lost_ = find_lost(error);
    } catch (...) {  // out of memory: no rank is reported as lost
    }
  }
  say_goodbye(goodbye_of(error));
}

void Shutdown::fail_call(const Error& error, const transport::Header& signature,
                         const Deadline& deadline) {
  ErrorFields fields = error.fields();
  fields.op = name_of(static_cast<Operation>(signature.operation));
  fields.rank = peers_.rank();
  fields.elapsed_s = deadline.elapsed_s();
  std::string text = error.what();
  if (!text.starts_with(fields.op + ": ")) text.insert(0, fields.op + ": ");
  if (error.kind() == ErrorKind::timeout && calls_.running() != nullptr) {
    const auto missing = find_unresponsive_peers(error);
    for (const int peer : missing)
      text += (peer == missing[0] ? "; missing from this call: " : ", ") + peers_.name(peer) +
              liveness_.describe_peer(peer);
    if (!missing.empty()) fields.peer = missing[0];
    const auto unmet = std::ranges::count_if(peers_.all(), [](const Peer& p) { return !p.link; });
    if (unmet > 1)  // this rank is one of them
      text += "; not connected and not checked: " + std::to_string(unmet - 1) + " ranks";
  }
  const Error reported(error.kind(), text, fields);
  fail(reported);
  throw reported;
}

void Shutdown::say_goodbye(const Goodbye& goodbye, std::chrono::nanoseconds wait,
                           const std::function<bool()>& interrupted) noexcept {
  try {
    peers_.close_connector();  // peers that have just connected receive it too
    peers_.say_goodbye(calls_.epoch(), goodbye);
    if (wait.count() > 0) (void)wait_for_goodbyes(Deadline(wait), interrupted);
  } catch (...) {  // out of memory: the peers see only the closed connection
  }
  peers_.close_all();
}

// A liveness check: a rank that waits in a call answers a goodbye message at once with its own.
// Returns the peers that did not answer.
std::vector<int> Shutdown::find_unresponsive_peers(const Error& error) {
  peers_.say_goodbye(calls_.epoch(), goodbye_of(error));
  return wait_for_goodbyes(Deadline(kLivenessTimeout), {});
}

// Until each connected peer has sent its goodbye or closed; returns those that have not.
std::vector<int> Shutdown::wait_for_goodbyes(const Deadline& deadline,
                                             const std::function<bool()>& interrupted) {
  for (;;) {
    std::vector<int> silent;
    std::vector<pollfd> waiting;
    bool idle = true;
    for (int peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_.at(peer).link || answers(peer, deadline)) continue;
      (void)peers_.at(peer).link->flush();  // our goodbye
      silent.push_back(peer);
      waiting.push_back(peers_.at(peer).link->channel().arm({true, false}));
      idle &= !answers(peer, deadline);  // in the meantime: do not sleep
    }
    if (silent.empty() || deadline.expired() || (interrupted && interrupted())) return silent;
    if (idle) peers_.wake_event().wait(waiting, std::chrono::milliseconds(10));
    for (size_t i = 0; i < silent.size(); ++i)
      peers_.at(silent[i]).link->channel().disarm(waiting[i].revents);
  }
}

// Discards what the peer sent before its goodbye, until the deadline.
bool Shutdown::answers(int peer, const Deadline& deadline) {
  const Peer& state = peers_.at(peer);
  try {
    while (const transport::Header* header = dispatcher_.front(peer)) {
      if (header->kind == transport::FrameKind::goodbye) return true;
      if (deadline.expired()) break;
      state.link->discard();
    }
  } catch (const PeerLost&) {  // a protocol error is an answer, too
    return true;
  }
  return state.left_reason || peers_.has_closed(peer);
}

// The blamed rank, unless it sent the reason of its own abort; ranks whose connection closed
// unexpectedly; and ranks that left cleanly.
std::vector<int> Shutdown::find_lost(const Error& error) {
  const int blamed =
      error.kind() == ErrorKind::peer_lost ? error.fields().peer : collectives::kNoRank;
  const Deadline deadline(kFinalPollTimeout);
  std::vector<int> found;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    const Peer& state = peers_.at(peer);
    bool is_lost = peer == blamed && (!state.left_reason || !state.link);
    // Its goodbye may have arrived without having been read.
    if (state.link && !state.left_reason && answers(peer, deadline)) {
      const transport::ConstBytes goodbye =
          state.link->has_front() ? state.link->peek() : transport::ConstBytes{};
      is_lost |= goodbye.empty() ? peers_.has_closed(peer) : is_clean_goodbye(goodbye);
    }
    if (is_lost || state.left_cleanly) found.push_back(peer);
  }
  return found;
}

}  // namespace pycomm::engine
