// What an engine does while no task runs: sends and reads heartbeats, and looks for failed peers.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include "engine/connections.h"
#include "engine/frame_dispatcher.h"
#include "engine/liveness.h"
#include "engine/peer_table.h"
#include "engine/shutdown.h"

namespace pycomm::engine {

class IdleMonitor {
 public:
  // `turn` is held by the thread that uses the links.
  IdleMonitor(std::mutex& turn, PeerTable& peers, Liveness& liveness, Connections& connections,
              FrameDispatcher& dispatcher, Shutdown& shutdown)
      : turn_(turn),
        peers_(peers),
        liveness_(liveness),
        connections_(connections),
        dispatcher_(dispatcher),
        shutdown_(shutdown) {}

  // From any thread. During a call it only sets a flag for end_call(). False once the engine is
  // broken.
  bool heartbeat() noexcept;
  // A call ends; with `turn` held.
  void end_call() noexcept {
    if (!heartbeat_due_.load(std::memory_order_relaxed)) return;
    heartbeat_due_.store(false, std::memory_order_relaxed);
    (void)exchange_heartbeats();
  }
  // From any thread: throws if any peer aborted the group, or if one of `awaited` failed. `limit`:
  // timeout of that wait. During a call it checks nothing, because the call does.
  void check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited);

 private:
  bool exchange_heartbeats() noexcept;
  void poll_for_failures(const std::vector<int>& awaited);
  void wait_for_close(const std::vector<int>& awaited);
  bool has_closed(int peer);
  bool closed_cleanly(int peer);

  std::mutex& turn_;
  PeerTable& peers_;
  Liveness& liveness_;
  Connections& connections_;
  FrameDispatcher& dispatcher_;
  Shutdown& shutdown_;
  std::atomic<bool> heartbeat_due_{false};  // heartbeat() was called during a call
};

}  // namespace pycomm::engine
