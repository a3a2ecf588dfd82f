// Ends an engine: keeps the first cause, notifies the peers, closes the links, and finds the lost
// ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "engine/call_sequence.h"
#include "engine/frame_dispatcher.h"
#include "engine/liveness.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class Shutdown {
 public:
  Shutdown(PeerTable& peers, const CallSequence& calls, const Liveness& liveness,
           FrameDispatcher& dispatcher)
      : peers_(peers), calls_(calls), liveness_(liveness), dispatcher_(dispatcher) {}

  // From any thread, as lost() and check_usable(): the first cause; empty: not broken.
  std::string cause() const;
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  // Throws GroupBroken with the first cause.
  void check_usable() const {
    if (broken()) throw_broken();
  }

  // Sends a goodbye message and closes the connections. Data already sent is still delivered. With
  // `wait`, closes them once all peers left or died, at the latest after this time, or as soon as
  // `interrupted` is true.
  void leave(std::chrono::nanoseconds wait, const std::function<bool()>& interrupted) noexcept;
  // Sends the peers the reason and closes the connections.
  void fail(const Error& error) noexcept;
  // The same for an error that ended the call `signature`, with what is known of it; throws it.
  [[noreturn]] void fail_call(const Error& error, const transport::Header& signature,
                              const Deadline& deadline);
  // The ranks that are known to be lost.
  std::vector<int> lost() const;

 private:
  [[noreturn]] void throw_broken() const;
  void say_goodbye(const Goodbye& goodbye, std::chrono::nanoseconds wait = {},
                   const std::function<bool()>& interrupted = {}) noexcept;
  std::vector<int> find_unresponsive_peers(const Error& error);
  std::vector<int> wait_for_goodbyes(const Deadline& deadline,
                                     const std::function<bool()>& interrupted);
  bool answers(int peer, const Deadline& deadline);
  std::vector<int> find_lost(const Error& error);

  PeerTable& peers_;
  const CallSequence& calls_;
  const Liveness& liveness_;
  FrameDispatcher& dispatcher_;
  std::atomic<bool> broken_{false};  // so that a call takes no lock to check it
  mutable std::mutex mutex_;         // guards the members below
  std::string cause_;
  std::vector<int> lost_;
};

}  // namespace pycomm::engine
