#include "engine/liveness.h"

#include <cstdio>
#include <utility>

namespace pycomm::engine {
namespace {

// Maximum age of the result of status().
constexpr std::chrono::milliseconds kFresh{50};

std::string seconds(std::chrono::nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(time).count());
  return text;
}

}  // namespace

bool Liveness::note_bytes(int peer) {
  const uint64_t received = peers_.at(peer).link->traffic().bytes_received;
  if (received == at(peer).bytes_received_seen) return false;
  const auto now = Clock::now();
  at(peer).bytes_received_seen = received;
  peers_.at(peer).silent_since = now;
  peers_.processes().note_bytes(peer, now);
  return true;
}

void Liveness::send(Clock::time_point now) {
  if (limit_.count() == 0) return;
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_.at(peer).link || peers_.at(peer).left_reason || peers_.has_closed(peer)) continue;
    Link& link = *peers_.at(peer).link;
    State& state = at(peer);
    if (link.traffic().bytes_written == state.bytes_sent_seen &&
        now - state.sent_at >= interval() && link.idle()) {
      transport::Header header = own_;
      header.epoch = calls_.epoch();
      header.bytes = 0;
      link.post(header, {});
      (void)link.flush();
      state.sent_at = now;
    }
    if (link.traffic().bytes_written == state.bytes_sent_seen) continue;
    state.bytes_sent_seen = link.traffic().bytes_written;
    state.sent_at = now;
  }
}

// A rank that was itself stopped or got no processor time cannot judge its peers: all get the full
// limit again.
void Liveness::update(Clock::time_point now) {
  const bool away = now - updated_at_ > 2 * interval();
  updated_at_ = now;
  for (Peer& peer : peers_.all())
    if (away || peer.silent_since == Clock::time_point{}) peer.silent_since = now;
  publish(now);
}

void Liveness::check(int peer, Clock::time_point now) const {
  if (limit_.count() == 0 || (!peers_.at(peer).link && !peers_.at(peer).requested)) return;
  if (now - peers_.at(peer).silent_since >= limit_)
    throw PeerLost(peers_.name(peer) + " sent no heartbeat for " + seconds(limit_) +
                       ": its process is stopped or its host failed",
                   {.peer = peer});
}

std::string Liveness::describe_peer(int peer) const {
  if (!at(peer).last) return "";
  return ", last seen " + seconds(Clock::now() - peers_.at(peer).silent_since) + " ago " +
         describe_activity(*at(peer).last);
}

void Liveness::publish(Clock::time_point now) {
  if (now - published_at_ < kFresh) return;
  published_at_ = now;
  Status all;
  if (own_.context != static_cast<uint16_t>(transport::CallState::not_started))
    all.current_call = describe_activity(own_);
  for (int peer = 0; peer < peers_.size(); ++peer) {
    const Peer& known = peers_.at(peer);
    Status::Peer seen;
    if (known.link) {
      seen.connected = !known.left_reason && !peers_.has_closed(peer);
      seen.left_reason = known.left_reason.value_or("");
      // Bytes may have arrived since `now` was read.
      const auto silent = std::max(Clock::duration{0}, now - known.silent_since);
      seen.last_seen_s = std::chrono::duration<double>(silent).count();
      if (at(peer).last) seen.current_call = describe_activity(*at(peer).last);
      seen.bytes_written = known.link->traffic().bytes_written;
      seen.bytes_received = known.link->traffic().bytes_received;
    }
    all.peers.push_back(std::move(seen));
  }
  const std::lock_guard lock(mutex_);
  published_ = std::move(all);
}

Status Liveness::status() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

}  // namespace pycomm::engine
