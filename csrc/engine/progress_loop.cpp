#include "engine/progress_loop.h"

#include <algorithm>

#include "core/cpu_relax.h"

namespace pycomm::engine {
namespace {

// Minimum time between calls of `interrupted`: it may wait for a lock (the GIL).
constexpr std::chrono::milliseconds kInterruptInterval{50};
constexpr int kPollsPerClock = 32, kStepsPerClock = 1024;
// After a sleep shorter than this, spinning would have ended the wait sooner.
constexpr std::chrono::microseconds kShortSleep{200};

// Releases the turn for its lifetime, so that heartbeat() may use the links.
struct ReleasedTurn {
  explicit ReleasedTurn(std::mutex& turn) : mutex(turn) { mutex.unlock(); }
  ReleasedTurn(const ReleasedTurn&) = delete;
  ReleasedTurn& operator=(const ReleasedTurn&) = delete;
  ~ReleasedTurn() { mutex.lock(); }
  std::mutex& mutex;
};

// Adds the time since `since` to a sum, also when the wait throws.
struct WaitTimer {
  std::chrono::nanoseconds& sum;
  Clock::time_point since;
  WaitTimer(std::chrono::nanoseconds& to, Clock::time_point from) : sum(to), since(from) {}
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;
  ~WaitTimer() { sum += Clock::now() - since; }
};

}  // namespace

bool ProgressLoop::drive(Task& task, const Deadline& deadline) {
  stop_.check();
  int polls = 0, steps = 0;
  Clock::time_point idle_since{}, idle_until{};
  os::ProcessorExclusion exclusion;
  bool has_processor = true;  // false: shares one with the awaited peer
  const bool can_be_suspended = task.can_be_suspended(), has_others = posted_.enabled();
  while (!task.done() && !(can_be_suspended && stop_.suspended())) {
    if (has_others && posted_.must_yield()) return false;
    const bool others = has_others && posted_.advance(stop_);
    // Two ranks that send to each other fill both channels, so one that cannot send reads.
    if (task.advance() || others || (task.receiving_from() == collectives::kNoRank && poll())) {
      waited_ += idle_until - idle_since;
      idle_since = idle_until = {};
      has_processor = true;
      if (++steps % kStepsPerClock == 0) check_abort_conditions(task, deadline);
      continue;
    }
    // Spin first: a peer often answers sooner than a sleeping thread wakes up.
    if (options_.spin.count() > 0 && worth_spinning(task)) {
      has_processor ? cpu_relax() : os::yield_processor();
      if (++polls % kPollsPerClock != 0 && has_processor) continue;
      has_processor = leave_processor_of_peer(task, exclusion);
      idle_until = Clock::now();
      if (idle_since == Clock::time_point{}) {
        idle_since = idle_until;
        spin_limit_ = std::max(options_.spin, spin_limit_ - spin_limit_ / 8);
      }
      if (idle_until - idle_since < spin_limit_) continue;
    }
    bool moved = false;
    {
      const auto since = idle_since == Clock::time_point{} ? Clock::now() : idle_since;
      const WaitTimer waiting{waited_, since};
      moved = sleep(task, deadline);
    }
    adapt_spin_limit(idle_since);
    idle_since = idle_until = {};
    if (!task.done()) check_between_sleeps(task, deadline, moved);
  }
  return true;
}

// Between two sleeps. The checks run also after progress: otherwise a peer that sends a few bytes
// at a time would delay signals, timeouts, aborts and this rank's heartbeats.
void ProgressLoop::check_between_sleeps(const Task& task, const Deadline& deadline, bool moved) {
  if (!moved) {
    const auto check_peers = [&](const Task& one) {
      dispatcher_.check_peers_needed(one.receiving_from(), one.sending_to());
      if (mailbox_.awaited_peer(&one) == kAnyPeer) peers_.require_any();
    };
    check_peers(task);
    posted_.visit(check_peers);
  }
  check_abort_conditions(task, deadline);
  if (!moved) check_heartbeats(task);
}

// Sets how long the next wait spins. Two ranks that both sleep after `spin` could miss each other
// repeatedly, because waking up takes longer than that. After a short sleep a rank therefore spins
// twice as long, and gradually less from then on. A sleep without spinning changes nothing.
void ProgressLoop::adapt_spin_limit(Clock::time_point idle_since) {
  if (idle_since == Clock::time_point{}) return;
  const auto idle = Clock::now() - idle_since;
  spin_limit_ = idle < kShortSleep ? std::max<std::chrono::nanoseconds>(spin_limit_, 2 * idle)
                                   : options_.spin;
}

// False where polling costs more than a sleep: while much data is in transit on a socket.
bool ProgressLoop::worth_spinning(const Task& task) const {
  const int from = task.receiving_from(),
            peer = from != collectives::kNoRank ? from : task.sending_to();
  if (peer < 0 ||
      (from != collectives::kNoRank && task.receiving_bytes() < transport::kSegmentBytes))
    return true;
  const auto& link = peers_.at(peer).link;
  return !link || !link->channel().polling_is_expensive();
}

// As Task::leave_processor_of_peer(), by what the task or the channel knows.
bool ProgressLoop::leave_processor_of_peer(Task& task, os::ProcessorExclusion& exclusion) const {
  if (const auto left = task.leave_processor_of_peer(exclusion)) return *left;
  const int from = task.receiving_from(), peer = from >= 0 ? from : task.sending_to();
  if (peer < 0 || !peers_.at(peer).link) return true;
  transport::Channel& channel = peers_.at(peer).link->channel();
  const int here = os::current_processor();
  if (here == os::kUnknownProcessor || channel.swap_processors(here) != here) return true;
  const bool left = exclusion.leave(here, {});
  (void)channel.swap_processors(os::current_processor());
  return left;
}

// Accepts connections, sends notices and handles the received frames of each peer. True on
// progress.
bool ProgressLoop::poll() {
  bool moved = peers_.accept();
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_.at(peer).link) continue;
    Link& link = *peers_.at(peer).link;
    const bool unsent = !link.idle();
    (void)link.flush();
    moved |= unsent && link.idle();
    dispatcher_.poll(peer);
    moved |= liveness_.note_bytes(peer);
  }
  return moved;
}

// Arms the links and the task, polls once more, and only then sleeps, so that no wake-up is lost.
// True on progress.
bool ProgressLoop::sleep(Task& task, const Deadline& deadline) {
  ProcessWatch& processes = peers_.processes();
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(longest_sleep(deadline));
  polled_.assign({{task.wake_descriptor(), POLLIN, 0}});  // poll() ignores -1
  peers_.add_connector_to(polled_);
  const size_t first_process = polled_.size();
  processes.clear();
  for (int peer = 0; peer < peers_.size(); ++peer)
    if (!peers_.at(peer).left_reason) processes.add(peer, polled_);
  arm(task);
  struct Disarm {
    ProgressLoop& loop;
    Task& task;
    ~Disarm() {
      task.disarm();
      const size_t first = loop.polled_.size() - loop.armed_.size();
      for (size_t i = 0; i < loop.armed_.size(); ++i)
        loop.armed_[i]->disarm(loop.polled_[first + i].revents);
    }
  };
  int woken = 1;
  {
    const Disarm disarm{*this, task};
    task.arm();
    // What was notified is looked for after it was cleared.
    if (posted_.enabled() || stop_.suspended()) stop_.clear();
    if (task.can_be_suspended() && stop_.suspended()) return true;
    if (task.advance() || posted_.advance(stop_) || posted_.must_yield()) return true;
    if (!poll()) woken = peers_.wake_event().poll(polled_, limit);
  }
  if (woken > 0) processes.find_ended(std::span(polled_).subspan(first_process));
  if (processes.pending()) processes.update();
  if (woken <= 0) interrupt_checked_at_ = {};  // a signal, or the poll timed out
  const auto request = [&](const Task& one) {
    if (one.receiving_from() >= 0) peers_.request(one.receiving_from());
  };
  if (woken == 0) {
    request(task);
    posted_.visit(request);
  }
  // Received data takes precedence over a goodbye behind it.
  if (task.advance()) return true;
  (void)poll();
  return task.done() || task.advance();
}

void ProgressLoop::arm(const Task& task) {
  armed_.clear();
  for (int peer = 0; peer < peers_.size(); ++peer) {
    Link* const link = peers_.at(peer).link.get();
    if (link == nullptr || link->channel().is_closed()) continue;
    armed_.push_back(&link->channel());
    const bool awaited = task.receiving_from() == peer;
    polled_.push_back(armed_.back()->arm({.receive = !dispatcher_.must_wait(peer, awaited),
                                          .send = !link->idle(),
                                          .bytes = awaited ? task.receiving_bytes() : 1}));
  }
}

std::chrono::nanoseconds ProgressLoop::longest_sleep(const Deadline& deadline) const {
  auto limit = std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left());
  if (liveness_.limit().count() > 0) limit = std::min(limit, liveness_.interval());
  if (peers_.processes().pending())
    limit = std::min<std::chrono::nanoseconds>(limit, ProcessWatch::kQuiet);
  return limit;
}

void ProgressLoop::check_abort_conditions(const Task& task, const Deadline& deadline) {
  stop_.check();
  const auto now = Clock::now();
  liveness_.send(now);
  if (options_.interrupted && now - interrupt_checked_at_ >= kInterruptInterval) {
    interrupt_checked_at_ = now;
    const ReleasedTurn released{turn_};
    if (options_.interrupted()) throw GroupBroken(peers_.name(peers_.rank()) + " was interrupted");
  }
  if (deadline.expired()) throw timed_out(task, deadline);
}

Timeout ProgressLoop::timed_out(const Task& task, const Deadline& deadline) const {
  const int from = task.receiving_from(), to = task.sending_to();
  const int peer = from != collectives::kNoRank ? from : to;
  std::string text = "Timed out after " + std::to_string(deadline.limit_s()) + " s";
  if (peer != collectives::kNoRank)
    text += (from != collectives::kNoRank ? ", waiting for data from " : ", waiting to send to ") +
            peers_.name(peer);
  if (mailbox_.awaited_peer(&task) == kAnyPeer) text += ", waiting for a message from any rank";
  return Timeout(text, {.peer = peer});
}

void ProgressLoop::check_heartbeats(const Task& task) {
  const auto now = Clock::now();
  const int from = task.receiving_from();
  for (int peer = 0; peer < peers_.size(); ++peer)
    if (peers_.at(peer).link && dispatcher_.must_wait(peer, peer == from))
      peers_.at(peer).silent_since = now;
  liveness_.update(now);
  const auto check_peers = [&](const Task& one) {
    for (const int peer : {one.receiving_from(), one.sending_to()})
      if (peer != collectives::kNoRank) liveness_.check(peer, now);
  };
  check_peers(task);
  posted_.visit(check_peers);
}

}  // namespace pycomm::engine
