#include "engine/idle_monitor.h"

#include <poll.h>

#include <algorithm>
#include <thread>

#include "engine/goodbye.h"

namespace pycomm::engine {

bool IdleMonitor::heartbeat() noexcept {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (turn) return exchange_heartbeats();
  heartbeat_due_.store(true, std::memory_order_relaxed);
  return true;
}

bool IdleMonitor::exchange_heartbeats() noexcept {
  if (shutdown_.broken()) return false;
  try {
    (void)connections_.accept();  // a peer that connected to this rank waits for a heartbeat
    const auto now = Clock::now();
    for (int peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_.at(peer).link) continue;
      const transport::Header* const waiting = dispatcher_.front_behind_heartbeats(peer);
      (void)liveness_.note_bytes(peer);
      // A frame that stays for the next call hides the heartbeats behind it.
      if (waiting != nullptr) liveness_.restart(peer, now);
    }
    liveness_.send(now);
    liveness_.update(now);
  } catch (...) {  // the next call reports the error of a link
  }
  return true;
}

void IdleMonitor::check_for_failures(std::chrono::nanoseconds limit,
                                     const std::vector<int>& awaited) {
  std::unique_lock turn(turn_, std::try_to_lock);
  const Deadline deadline(limit);
  while (!turn && !deadline.expired()) {
    std::this_thread::yield();
    (void)turn.try_lock();
  }
  shutdown_.check_usable();
  if (!turn || !dispatcher_.between_calls()) return;
  try {
    poll_for_failures(awaited);
    while (!deadline.expired()) {
      wait_for_close(awaited);
      poll_for_failures(awaited);
    }
  } catch (const Error& error) {
    shutdown_.fail(error);
    throw;
  }
}

void IdleMonitor::poll_for_failures(const std::vector<int>& awaited) {
  for (int peer = 0; peer < peers_.size(); ++peer) {
    const Peer& state = peers_.at(peer);
    if (!state.link) continue;
    const bool last = std::ranges::count(awaited, peer) > 0 && has_closed(peer);
    const transport::Header* header = dispatcher_.front_behind_heartbeats(peer);
    if (header != nullptr && header->kind == transport::FrameKind::goodbye)
      dispatcher_.read_notice(peer, *header);
    if (last && !state.left_reason && (header == nullptr || !closed_cleanly(peer)))
      dispatcher_.throw_peer_error(peer);
  }
}

// Waits until one of them closes its connection, as every rank does at its end, or for 10 ms.
void IdleMonitor::wait_for_close(const std::vector<int>& awaited) {
  std::vector<pollfd> polled;
  std::vector<transport::Channel*> armed;
  for (const int peer : awaited) {
    if (!peers_.at(peer).link || peers_.at(peer).link->channel().is_closed()) continue;
    armed.push_back(&peers_.at(peer).link->channel());
    polled.push_back(armed.back()->arm({}));
  }
  ::poll(polled.data(), polled.size(), 10);
  for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(polled[i].revents);
}

// Polls the descriptor, because some channels detect a closed connection only by it.
bool IdleMonitor::has_closed(int peer) {
  if (peers_.has_closed(peer)) return true;
  transport::Channel& channel = peers_.at(peer).link->channel();
  pollfd polled = channel.arm({});
  ::poll(&polled, 1, 0);
  channel.disarm(polled.revents);
  ProcessWatch& processes = peers_.processes();
  if (!peers_.at(peer).left_reason) processes.look(peer);
  if (processes.pending()) processes.update();
  return peers_.has_closed(peer);
}

// Whether a clean goodbye of `peer` follows the frame at the front, which the next call may read.
bool IdleMonitor::closed_cleanly(int peer) {
  const auto goodbye = peers_.at(peer).link->behind_front(transport::FrameKind::goodbye);
  return goodbye && is_clean_goodbye(*goodbye);
}

}  // namespace pycomm::engine
