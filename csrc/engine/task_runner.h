// Runs one task at a time, as part of a call, from the thread whose turn it is. An error other than
// Mismatch breaks the engine.
#pragma once

#include <mutex>
#include <span>
#include <vector>

#include "core/deadline.h"
#include "engine/call_sequence.h"
#include "engine/idle_monitor.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/progress_loop.h"
#include "engine/shutdown.h"
#include "engine/task.h"

namespace pycomm::engine {

// The call that a task is part of.
struct TaskCall {
  const transport::Header& signature;     // what errors and heartbeats report
  bool is_collective = true;              // false: a message, which has no number in the epoch
  std::span<const size_t> peer_counts{};  // as in PlanJob
};

class TaskRunner {
 public:
  // `turn` is held by the thread that uses the links.
  TaskRunner(std::mutex& turn, CallSequence& calls, Mailbox& mailbox, Liveness& liveness,
             ProgressLoop& loop, IdleMonitor& idle, Shutdown& shutdown)
      : turn_(turn),
        calls_(calls),
        mailbox_(mailbox),
        liveness_(liveness),
        loop_(loop),
        idle_(idle),
        shutdown_(shutdown) {}

  // Throws GroupBroken if the engine is broken or has left.
  void run(Task& task, const TaskCall& call, const Deadline& deadline);
  // Memory that a task may use until it is done.
  transport::Bytes scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return {scratch_.data(), bytes};
  }

 private:
  std::mutex& turn_;
  CallSequence& calls_;
  Mailbox& mailbox_;
  Liveness& liveness_;
  ProgressLoop& loop_;
  IdleMonitor& idle_;
  Shutdown& shutdown_;
  std::vector<std::byte> scratch_;
};

}  // namespace pycomm::engine
