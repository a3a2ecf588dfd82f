// How an engine tells a rank that is stopped, or whose host is gone, from one that is merely busy.
//
// A busy rank pulses: from inside a call between two looks at its links, and between calls from
// group/pulse.h, which needs nothing that Python could hold. Pulses go where nothing else was
// written for an interval, a fifth of the limit. Judged is only who is waited for, and only by a
// rank that was there to hear. And how it sees that the process of a peer on its host has ended.
#include <algorithm>
#include <cstdio>

#include "engine/engine.h"

namespace pycomm {
namespace {

// No sleep is longer, so that signals and deadlines are looked at.
constexpr std::chrono::milliseconds kSlice{100};
// How long no byte of a process that has ended must have come, until none will.
constexpr std::chrono::milliseconds kQuiet{50};
// How old what sightings() tells may be.
constexpr std::chrono::milliseconds kFresh{50};

std::string seconds(std::chrono::nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(time).count());
  return text;
}

// Where the sender of a header is, as far as it tells.
std::string doing_of(const Header& header) {
  const std::string call = "call " + std::to_string(header.sequence) + ", " + describe(header);
  if (header.kind == FrameKind::data) return "with a frame of " + call;
  switch (static_cast<CallState>(header.context)) {
    case CallState::not_started:
      return "before its first call";
    case CallState::in_call:
      return "inside " + call;
    case CallState::idle:
      return "outside of calls, after " + call;
  }
  return {};
}

}  // namespace

std::chrono::nanoseconds Engine::longest_sleep(const Deadline& deadline) const {
  auto limit = std::min<std::chrono::nanoseconds>(kSlice, deadline.left());
  if (options_.heartbeat.count() > 0) limit = std::min(limit, pulse_interval());
  if (ending_) limit = std::min<std::chrono::nanoseconds>(limit, kQuiet);
  return limit;
}

// Between the end of a process and the sight of it all that it sent has been handed to the kernel,
// and what is in shared memory is there. A socket that another process holds open may yet deliver
// what this rank has not made room for: as long as bytes come, a peer is not over.
void Engine::watch_process(int peer) {
  const auto i = static_cast<size_t>(peer);
  const int64_t pid = i < options_.pids.size() ? options_.pids[i] : 0;
  at(peer).process = Process(pid);
  if (!at(peer).process.ended()) return;
  at(peer).quiet_since = Clock::now();
  ending_ = true;
}

// Whose processes, of those that polled_ holds from `first` on, have ended.
void Engine::find_ended(size_t first) {
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (polled_[first + i].revents == 0) continue;
    Peer& who = at(watched_[i]);
    who.process.found_ended();
    who.quiet_since = Clock::now();
    ending_ = true;
  }
}

void Engine::settle_ended() {
  const auto now = Clock::now();
  ending_ = false;
  for (Peer& who : peers_) {
    if (!who.process.ended() || who.ended) continue;
    who.ended = now - who.quiet_since >= kQuiet;
    ending_ |= !who.ended;
  }
}

bool Engine::pulse() noexcept {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (turn) return beat();
  beat_due_.store(true, std::memory_order_relaxed);
  return true;
}

bool Engine::beat() noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) return false;
    }
    (void)admit();  // whoever has called this rank waits to hear of it
    const auto now = Clock::now();
    for (size_t i = 0; i < peers_.size(); ++i) {
      Peer& who = peers_[i];
      if (!who.link) continue;
      const Header* header = front(static_cast<int>(i));
      while (header != nullptr && header->kind == FrameKind::heartbeat) {
        take_pulse(static_cast<int>(i), *header);
        header = front(static_cast<int>(i));
      }
      // What stays for the next call hides the pulses behind it.
      if (header != nullptr || who.link->bytes_received() != who.seen) who.heard = now;
      who.seen = who.link->bytes_received();
    }
    say_alive(now);
    listen(now);
  } catch (...) {  // whatever is wrong with a link is told by the next call
  }
  return true;
}

void Engine::say_alive(Clock::time_point now) {
  if (options_.heartbeat.count() == 0) return;
  for (Peer& who : peers_) {
    if (!who.link || who.departed || over(who)) continue;
    Link& link = *who.link;
    if (link.bytes_written() == who.told && now - who.told_at >= pulse_interval() && link.idle()) {
      Header header = last_;
      header.epoch = epoch_;
      header.bytes = 0;
      link.post(header, {});
      (void)link.flush();
      who.told_at = now;
    }
    if (link.bytes_written() == who.told) continue;
    who.told = link.bytes_written();
    who.told_at = now;
  }
}

// Whoever was away itself, stopped or starved, knows nothing of the others: all get the limit anew.
void Engine::listen(Clock::time_point now) {
  const bool away = now - listened_ > 2 * pulse_interval();
  listened_ = now;
  for (Peer& who : peers_)
    if (away || who.heard == Clock::time_point{}) who.heard = now;
  publish(now);
}

void Engine::check_silence(const Task& task) {
  const auto now = Clock::now();
  for (size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i].link && must_wait(static_cast<int>(i), task)) peers_[i].heard = now;
  listen(now);
  if (options_.heartbeat.count() == 0) return;
  for (const int peer : {task.receiving_from(), task.sending_to()})
    if (peer != kNoRank && (at(peer).link || at(peer).wanted) &&
        now - at(peer).heard >= options_.heartbeat)
      throw PeerLost(name(peer) + " has not been heard of for " + seconds(options_.heartbeat) +
                         ": it is stopped or its host is gone",
                     {.peer = peer});
}

// What arrives as a frame but is none is its sender's doing.
const Header* Engine::front(int peer) {
  try {
    return at(peer).link->front();
  } catch (const PeerLost& error) {
    throw unreadable(peer, error.what());
  }
}

void Engine::publish(Clock::time_point now) {
  if (now - published_ < kFresh) return;
  std::vector<Sighting> all;
  for (const Peer& who : peers_) {
    Sighting seen;
    if (who.link) {
      seen.connected = !who.departed && !over(who);
      seen.departed = who.departed;
      seen.silent_s = std::chrono::duration<double>(now - who.heard).count();
      if (who.last) seen.doing = doing_of(*who.last);
      seen.bytes_written = who.link->bytes_written();
      seen.bytes_received = who.link->bytes_received();
    }
    all.push_back(std::move(seen));
  }
  const std::lock_guard lock(mutex_);
  published_ = now;
  doing_ = last_.context == static_cast<uint16_t>(CallState::not_started) ? "" : doing_of(last_);
  sightings_ = std::move(all);
}

std::string Engine::doing() const {
  const std::lock_guard lock(mutex_);
  return doing_;
}

std::vector<Sighting> Engine::sightings() const {
  const std::lock_guard lock(mutex_);
  return sightings_;
}

// Of a rank that is missing from a call: what it was last known to do.
std::string Engine::known_of(const Peer& who) const {
  if (!who.last) return "";
  return ", last heard of " + seconds(Clock::now() - who.heard) + " ago " + doing_of(*who.last);
}

}  // namespace pycomm
