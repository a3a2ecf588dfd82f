// Runs plans and messages over links, on the host, on the caller's thread.
//
// One thread at a time; group/ ensures that. A failure has one of two effects. A mismatch starts a
// new epoch: all ranks drop the calls of the old one and continue. Every other failure breaks the
// engine: it sends its peers the reason, closes the connections, and reports the first cause from
// then on.
//
// The engine only connects its parts: docs/architecture.md lists them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/call_sequence.h"
#include "engine/connections.h"
#include "engine/frame_dispatcher.h"
#include "engine/frame_sender.h"
#include "engine/idle_monitor.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/messenger.h"
#include "engine/mismatch_protocol.h"
#include "engine/peer_connector.h"
#include "engine/peer_table.h"
#include "engine/plan_task.h"
#include "engine/progress_loop.h"
#include "engine/shutdown.h"
#include "engine/task_runner.h"

namespace pycomm::engine {

struct EngineOptions {
  int rank = 0;
  std::vector<std::string> names;    // by rank: "rank 2 (host a, pid 77)"
  std::chrono::nanoseconds spin{0};  // minimum time that a wait spins before it sleeps
  // An awaited peer that sends nothing for this time is lost; 0: never.
  std::chrono::nanoseconds heartbeat{0};
  std::function<bool()> interrupted;
  // Opens missing channels; outlives the engine.
  PeerConnector* connector = nullptr;
  // By rank: the process id as this process sees it; 0 or an empty list: not visible.
  std::vector<int64_t> pids{};
};

class Engine {
 public:
  // `channels` by rank; null for this rank and, with a connector, for peers that are not connected
  // yet.
  Engine(std::vector<std::unique_ptr<transport::Channel>> channels, EngineOptions options);
  ~Engine() { leave(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return peers_.rank(); }
  void run(const PlanJob& job, const Deadline& deadline);
  // The same for any task; `header` is next_header() of its signature.
  void run(Task& task, const transport::Header& header, const Deadline& deadline);
  transport::Header next_header(const transport::Header& signature) const {
    return calls_.next_header(signature);
  }

  Messenger& messenger() { return messenger_; }
  // From any thread: whether receive_any() ends, also a later one, before it has a message.
  void set_suspended(bool suspended) noexcept { suspended ? loop_.suspend() : loop_.resume(); }

  // See Shutdown::leave().
  void leave(std::chrono::nanoseconds wait = {},
             const std::function<bool()>& interrupted = {}) noexcept;
  // Sends the peers the reason and closes the connections; later calls throw GroupBroken with it.
  void fail(const Error& error) noexcept;
  // `peer` closed its connection: throws the error in its goodbye message, which may follow frames
  // that no call will read any more.
  [[noreturn]] void throw_peer_error(int peer) { dispatcher_.throw_peer_error(peer); }
  // From any thread: ends the current wait with GroupBroken.
  void stop(const std::string& reason) noexcept { loop_.stop(reason); }
  // From any thread: whether the engine is broken or has left.
  bool broken() const { return shutdown_.broken(); }
  // Throws GroupBroken then.
  void check_usable() const { shutdown_.check_usable(); }
  // Call between collectives while waiting outside the engine. Throws if any peer aborted the
  // group, or if one of `awaited` failed. `limit`: timeout of that wait. While a call runs in
  // another thread, that call checks.
  void check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited) {
    idle_.check_for_failures(limit, awaited);
  }
  // From any thread, at least every heartbeat_interval(): sends heartbeats on idle links and reads
  // received ones. During a call the call itself does this, at its end at the latest. False once
  // the engine is broken.
  bool heartbeat() noexcept { return idle_.heartbeat(); }
  std::chrono::nanoseconds heartbeat_interval() const { return liveness_.interval(); }
  // From any thread, also during a call.
  EngineStatus status() const;
  // For the thread that makes the calls: as of the end of the last one.
  const EngineTraffic& traffic() const { return runner_.traffic(); }

  // For tasks: a task of `job` that another task advances.
  PlanTask plan_task(const PlanJob& job, const transport::Header& header) {
    return {peers_, sender_, dispatcher_, job, header, scratch(job.scratch_bytes())};
  }
  MismatchProtocol& mismatches() { return mismatches_; }
  // Throws PeerLost, which blames `peer`, unless what it sent is valid.
  void require_valid(int peer, bool valid, std::string_view what) const {
    peers_.require_valid(peer, valid, what);
  }
  // Wakes `peer`, which shares memory with this rank, if it sleeps.
  void wake_peer(int peer) { peers_.at(peer).link->channel().wake_peer(); }
  transport::Bytes scratch(size_t bytes) { return runner_.scratch(bytes); }

 private:
  // Held by the thread that uses the links: a call, except while it calls `interrupted`, or
  // heartbeat().
  mutable std::mutex turn_;
  PeerTable peers_;
  CallSequence calls_;
  Mailbox mailbox_;
  Liveness liveness_;
  MismatchProtocol mismatches_;
  Connections connections_;
  FrameDispatcher dispatcher_;
  FrameSender sender_;
  Shutdown shutdown_;
  ProgressLoop loop_;
  IdleMonitor idle_;
  TaskRunner runner_;
  Messenger messenger_;
};

}  // namespace pycomm::engine
