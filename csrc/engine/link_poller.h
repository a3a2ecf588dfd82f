// Polls all links at once, and sleeps until one of them can make progress.
#pragma once

#include <poll.h>

#include <chrono>
#include <optional>
#include <vector>

#include "engine/connections.h"
#include "engine/frame_dispatcher.h"
#include "engine/liveness.h"
#include "engine/peer_table.h"
#include "engine/task.h"

namespace pycomm::engine {

class LinkPoller {
 public:
  LinkPoller(PeerTable& peers, Liveness& liveness, Connections& connections,
             FrameDispatcher& dispatcher)
      : peers_(peers), liveness_(liveness), connections_(connections), dispatcher_(dispatcher) {}

  // Accepts connections, sends notices and handles the received frames of each peer. True on
  // progress.
  bool poll();
  // Arms the links and the task, polls once more, and only then sleeps, for at most `limit` or
  // until `stop` is readable, so that no wake-up is lost. Null: the task advanced and nothing
  // slept. Else as poll(2): 0 after `limit`, negative after a signal.
  std::optional<int> sleep(Task& task, const pollfd& stop, std::chrono::nanoseconds limit);

 private:
  void arm(const Task& task);
  void disarm();

  PeerTable& peers_;
  Liveness& liveness_;
  Connections& connections_;
  FrameDispatcher& dispatcher_;
  // Of the current sleep: `stop`, the task, the connector, processes, and the channels of armed_.
  std::vector<pollfd> polled_;
  std::vector<transport::Channel*> armed_;
};

}  // namespace pycomm::engine
