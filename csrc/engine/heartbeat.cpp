// Distinguishes a rank that is stopped, or whose host failed, from a busy one.
//
// A busy rank sends heartbeats: inside a call between two polls of its links, and between calls
// from observe/heartbeat_thread.h, which never needs the GIL. A link gets one if nothing else was
// written for an interval, a fifth of the limit. A rank checks only the peers that it waits for,
// and only if its own progress thread has been running. This file also detects that the process of
// a peer on the same host ended.
#include <algorithm>
#include <cstdio>

#include "engine/engine.h"

namespace pycomm {
namespace {

// Maximum length of a sleep, so that signals and deadlines are checked.
constexpr std::chrono::milliseconds kSlice{100};
// If a process ended and no byte of it arrived for this time, no more bytes will arrive.
constexpr std::chrono::milliseconds kQuiet{50};
// Maximum age of the result of peer_statuses().
constexpr std::chrono::milliseconds kFresh{50};

std::string seconds(std::chrono::nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(time).count());
  return text;
}

// The call state of the sender of a header.
std::string describe_activity(const Header& header) {
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
  if (options_.heartbeat.count() > 0) limit = std::min(limit, heartbeat_interval());
  if (process_ended_) limit = std::min<std::chrono::nanoseconds>(limit, kQuiet);
  return limit;
}

// When the end of a process is detected, all that it sent is in the kernel or in shared memory. A
// socket that another process keeps open may still deliver bytes for which this rank had no buffer
// space. A peer therefore counts as ended only when no more bytes arrive.
void Engine::watch_process(int peer) {
  const auto i = static_cast<size_t>(peer);
  const int64_t pid = i < options_.pids.size() ? options_.pids[i] : 0;
  at(peer).process = Process(pid);
  if (!at(peer).process.ended()) return;
  at(peer).last_byte_at = Clock::now();
  process_ended_ = true;
}

// Marks the peers whose processes ended; polled_ holds those processes from index `first` on.
void Engine::find_ended(size_t first) {
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (polled_[first + i].revents == 0) continue;
    PeerState& state = at(watched_[i]);
    state.process.found_ended();
    state.last_byte_at = Clock::now();
    process_ended_ = true;
  }
}

void Engine::update_ended() {
  const auto now = Clock::now();
  process_ended_ = false;
  for (PeerState& state : peers_) {
    if (!state.process.ended() || state.ended) continue;
    state.ended = now - state.last_byte_at >= kQuiet;
    process_ended_ |= !state.ended;
  }
}

bool Engine::heartbeat() noexcept {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (turn) return send_heartbeats_locked();
  heartbeat_due_.store(true, std::memory_order_relaxed);
  return true;
}

bool Engine::send_heartbeats_locked() noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_.empty()) return false;
    }
    (void)accept_connections();  // a peer that connected to this rank waits for a heartbeat
    const auto now = Clock::now();
    for (size_t i = 0; i < peers_.size(); ++i) {
      PeerState& state = peers_[i];
      if (!state.link) continue;
      const Header* header = front(static_cast<int>(i));
      while (header != nullptr && header->kind == FrameKind::heartbeat) {
        take_heartbeat(static_cast<int>(i), *header);
        header = front(static_cast<int>(i));
      }
      // A frame that stays for the next call hides the heartbeats behind it.
      if (header != nullptr || state.link->bytes_received() != state.bytes_received_seen)
        state.last_received_at = now;
      state.bytes_received_seen = state.link->bytes_received();
    }
    send_heartbeats(now);
    update_last_received(now);
  } catch (...) {  // the next call reports the error of a link
  }
  return true;
}

void Engine::send_heartbeats(Clock::time_point now) {
  if (options_.heartbeat.count() == 0) return;
  for (PeerState& state : peers_) {
    if (!state.link || state.left_reason || over(state)) continue;
    Link& link = *state.link;
    if (link.bytes_written() == state.bytes_sent_seen &&
        now - state.sent_at >= heartbeat_interval() && link.idle()) {
      Header header = last_;
      header.epoch = epoch_;
      header.bytes = 0;
      link.post(header, {});
      (void)link.flush();
      state.sent_at = now;
    }
    if (link.bytes_written() == state.bytes_sent_seen) continue;
    state.bytes_sent_seen = link.bytes_written();
    state.sent_at = now;
  }
}

// A rank that was itself stopped or got no processor time cannot judge its peers: all get the full
// limit again.
void Engine::update_last_received(Clock::time_point now) {
  const bool away = now - updated_at_ > 2 * heartbeat_interval();
  updated_at_ = now;
  for (PeerState& state : peers_)
    if (away || state.last_received_at == Clock::time_point{}) state.last_received_at = now;
  publish(now);
}

void Engine::check_heartbeats(const Task& task) {
  const auto now = Clock::now();
  for (size_t i = 0; i < peers_.size(); ++i)
    if (peers_[i].link && must_wait(static_cast<int>(i), task)) peers_[i].last_received_at = now;
  update_last_received(now);
  if (options_.heartbeat.count() == 0) return;
  for (const int peer : {task.receiving_from(), task.sending_to()})
    if (peer != kNoRank && (at(peer).link || at(peer).requested) &&
        now - at(peer).last_received_at >= options_.heartbeat)
      throw PeerLost(name(peer) + " sent no heartbeat for " + seconds(options_.heartbeat) +
                         ": its process is stopped or its host failed",
                     {.peer = peer});
}

// An invalid frame is a protocol error of its sender.
const Header* Engine::front(int peer) {
  try {
    return at(peer).link->front();
  } catch (const PeerLost& error) {
    throw protocol_violation(peer, error.what());
  }
}

void Engine::publish(Clock::time_point now) {
  if (now - published_ < kFresh) return;
  std::vector<PeerStatus> all;
  for (const PeerState& state : peers_) {
    PeerStatus seen;
    if (state.link) {
      seen.connected = !state.left_reason && !over(state);
      seen.left_reason = state.left_reason;
      seen.last_seen_s = std::chrono::duration<double>(now - state.last_received_at).count();
      if (state.last) seen.current_call = describe_activity(*state.last);
      seen.bytes_written = state.link->bytes_written();
      seen.bytes_received = state.link->bytes_received();
    }
    all.push_back(std::move(seen));
  }
  const std::lock_guard lock(mutex_);
  published_ = now;
  current_call_ = last_.context == static_cast<uint16_t>(CallState::not_started)
                      ? ""
                      : describe_activity(last_);
  peer_statuses_ = std::move(all);
}

std::string Engine::current_call() const {
  const std::lock_guard lock(mutex_);
  return current_call_;
}

std::vector<PeerStatus> Engine::peer_statuses() const {
  const std::lock_guard lock(mutex_);
  return peer_statuses_;
}

// The last known activity of a rank that is missing from a call.
std::string Engine::describe_peer(const PeerState& state) const {
  if (!state.last) return "";
  return ", last seen " + seconds(Clock::now() - state.last_received_at) + " ago " +
         describe_activity(*state.last);
}

}  // namespace pycomm
