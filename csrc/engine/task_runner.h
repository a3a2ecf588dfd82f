// Runs one task at a time, as part of a call, from the thread whose turn it is. An error other than
// Mismatch breaks the engine.
#pragma once

#include <chrono>
#include <mutex>
#include <span>
#include <vector>

#include "core/deadline.h"
#include "engine/call_sequence.h"
#include "engine/frame_sender.h"
#include "engine/idle_monitor.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/peer_table.h"
#include "engine/progress_loop.h"
#include "engine/shutdown.h"
#include "engine/task.h"

namespace pycomm::engine {

// Sums over all links since the start. `waited` is the time in which calls made no progress,
// without waits of a few microseconds, during which no clock is read.
struct EngineTraffic {
  uint64_t frames_sent = 0, payload_sent = 0, bytes_written = 0, bytes_received = 0;
  std::chrono::nanoseconds waited{0};
};

// The call that a task is part of.
struct TaskCall {
  const transport::Header& signature;     // what errors and heartbeats report
  bool is_collective = true;              // false: a message, which has no number in the epoch
  std::span<const size_t> peer_counts{};  // as in PlanJob
};

class TaskRunner {
 public:
  // `turn` is held by the thread that uses the links.
  TaskRunner(std::mutex& turn, const PeerTable& peers, CallSequence& calls, Mailbox& mailbox,
             Liveness& liveness, const FrameSender& sender, ProgressLoop& loop, IdleMonitor& idle,
             Shutdown& shutdown)
      : turn_(turn),
        peers_(peers),
        calls_(calls),
        mailbox_(mailbox),
        liveness_(liveness),
        sender_(sender),
        loop_(loop),
        idle_(idle),
        shutdown_(shutdown) {}

  // Throws GroupBroken if the engine is broken or has left.
  void run(Task& task, const TaskCall& call, const Deadline& deadline);
  // For the thread that calls run(): as of the end of the last task.
  const EngineTraffic& traffic() const { return traffic_; }
  // Memory that a task may use until it is done.
  transport::Bytes scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return {scratch_.data(), bytes};
  }

 private:
  EngineTraffic sum() const;

  std::mutex& turn_;
  const PeerTable& peers_;
  CallSequence& calls_;
  Mailbox& mailbox_;
  Liveness& liveness_;
  const FrameSender& sender_;
  ProgressLoop& loop_;
  IdleMonitor& idle_;
  Shutdown& shutdown_;
  EngineTraffic traffic_;
  std::vector<std::byte> scratch_;
};

}  // namespace pycomm::engine
