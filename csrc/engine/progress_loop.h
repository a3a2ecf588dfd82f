// Advances a task until it is done: spins first, then sleeps until a link can make progress, and
// between two sleeps checks for signals, timeouts, aborts and failed peers.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "engine/frame_dispatcher.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/peer_table.h"
#include "engine/posted_messages.h"
#include "engine/stop_signal.h"
#include "engine/task.h"

namespace pycomm::engine {

class ProgressLoop {
 public:
  struct Options {
    std::chrono::nanoseconds spin{0};     // minimum time that a wait spins before it sleeps
    std::function<bool()> interrupted{};  // called without `turn`
  };

  // `turn` is held by the thread that drives.
  ProgressLoop(Options options, std::mutex& turn, PeerTable& peers, const Mailbox& mailbox,
               Liveness& liveness, FrameDispatcher& dispatcher, PostedMessages& posted)
      : options_(std::move(options)),
        turn_(turn),
        peers_(peers),
        mailbox_(mailbox),
        liveness_(liveness),
        dispatcher_(dispatcher),
        posted_(posted) {}

  // Returns when the task is done or suspended, or false when it must yield (PostedMessages).
  bool drive(Task& task, const Deadline& deadline);
  // The error of a task whose deadline expired.
  Timeout timed_out(const Task& task, const Deadline& deadline) const;
  // Ends the current wait, and later ones.
  StopSignal& stop() { return stop_; }
  bool interrupted() const { return options_.interrupted && options_.interrupted(); }
  // Total time in which tasks made no progress, without waits of a few microseconds, during which
  // no clock is read.
  std::chrono::nanoseconds waited() const { return waited_; }

 private:
  bool poll();
  bool worth_spinning(const Task& task) const;
  bool leave_processor_of_peer(Task& task, os::ProcessorExclusion& exclusion) const;
  void adapt_spin_limit(Clock::time_point idle_since);
  bool sleep(Task& task, const Deadline& deadline);
  void arm(const Task& task);
  std::chrono::nanoseconds longest_sleep(const Deadline& deadline) const;
  void check_between_sleeps(const Task& task, const Deadline& deadline, bool moved);
  void check_abort_conditions(const Task& task, const Deadline& deadline);
  void check_heartbeats(const Task& task);

  Options options_;
  std::mutex& turn_;
  PeerTable& peers_;
  const Mailbox& mailbox_;
  Liveness& liveness_;
  FrameDispatcher& dispatcher_;
  PostedMessages& posted_;
  StopSignal stop_{peers_.wake_event()};
  // Of the current sleep: the task, the connector, processes, and the channels of armed_.
  std::vector<pollfd> polled_;
  std::vector<transport::Channel*> armed_;
  std::chrono::nanoseconds spin_limit_{0};    // how long the next wait spins
  Clock::time_point interrupt_checked_at_{};  // when options_.interrupted was last called
  std::chrono::nanoseconds waited_{0};
};

}  // namespace pycomm::engine
