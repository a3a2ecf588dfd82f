// Runs plans and messages over links, on the host, on the caller's thread.
//
// The state of an engine, and the functions that change it:
//
//   from      by                        to
//   idle      run(), messenger()        in call
//   in call   the task is done          idle: the next number, if the call is a collective
//   in call   Mismatch                  idle: the next epoch, number 0
//   in call   any other error           broken
//   idle      fail(), leave(),          broken
//             check_for_failures()
//   broken    leave(), fail()           broken, with the first cause
//
// Invariants:
//
//  0. Calls of several threads at once require EngineOptions::thread_multiple: posted_messages.h.
//  1. One thread at a time uses the links and the parts of this class. It holds turn_: a call,
//     except while it calls `interrupted`; heartbeat(), check_for_failures(), leave() and fail().
//  2. Only in a call does CallSequence have a current collective, or Mailbox an awaited message.
//  3. The calls of an epoch have the numbers 0, 1, 2, ... on all ranks. A mismatch starts the next
//     epoch on all ranks: they drop the calls of the old one and continue.
//  4. Once broken, all links are closed, the peers know the reason, and every call throws the first
//     cause.
//
// group/ ensures that one thread at a time makes collectives, and without thread_multiple that one
// thread at a time makes calls. docs/architecture.md lists the parts.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/atomic_words.h"
#include "core/deadline.h"
#include "engine/call_sequence.h"
#include "engine/frame_dispatcher.h"
#include "engine/liveness.h"
#include "engine/mailbox.h"
#include "engine/messenger.h"
#include "engine/mismatch_protocol.h"
#include "engine/peer_connector.h"
#include "engine/peer_table.h"
#include "engine/plan_task.h"
#include "engine/posted_messages.h"
#include "engine/progress_loop.h"
#include "engine/shutdown.h"
#include "engine/task.h"

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
  // Several threads may run messages at once, also during a collective.
  bool thread_multiple = false;
};

// Sums over all links since the start. `waited` is the time in which calls made no progress,
// without waits of a few microseconds, during which no clock is read.
struct EngineTraffic : LinkTraffic {
  std::chrono::nanoseconds waited{0};
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
  // `header`: of a collective, next_header() of its signature; of a message, which has no number,
  // what errors and heartbeats report. An error other than Mismatch breaks the engine. Throws
  // GroupBroken if it is broken. `peer_counts` as in Job.
  void run(Task& task, const transport::Header& header, const Deadline& deadline,
           std::span<const size_t> peer_counts = {});
  transport::Header next_header(const transport::Header& signature) const {
    return calls_.next_header(signature);
  }

  Messenger& messenger() { return messenger_; }
  // Whether a send of so many bytes, if it is the next call, copies them and does not wait.
  bool can_send_at_once(int to, size_t bytes);

  // See Shutdown::leave().
  void leave(std::chrono::nanoseconds wait = {},
             const std::function<bool()>& interrupted = {}) noexcept;
  // Sends the peers the reason and closes the connections; later calls throw GroupBroken with it.
  void fail(const Error& error) noexcept;
  // `peer` closed its connection: throws the error in its goodbye message, which may follow frames
  // that no call will read any more.
  [[noreturn]] void throw_peer_error(int peer) { dispatcher_.throw_peer_error(peer); }
  // From any thread: ends the current wait with GroupBroken, or receive_any(), also a later one,
  // before it has a message.
  StopSignal& stop() { return loop_.stop(); }
  // From any thread: whether the engine is broken or has left.
  bool broken() const { return shutdown_.broken(); }
  // Throws GroupBroken then.
  void check_usable() const { shutdown_.check_usable(); }
  // Call between collectives while waiting outside the engine. Throws if any peer aborted the
  // group, or if one of `awaited` failed. `limit`: timeout of that wait. While a call runs in
  // another thread, that call checks.
  void check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited);
  // From any thread, at least every heartbeat_interval(): sends heartbeats on idle links and reads
  // received ones. During a call the call itself does this, at its end at the latest. False once
  // the engine is broken.
  bool heartbeat() noexcept;
  std::chrono::nanoseconds heartbeat_interval() const { return liveness_.interval(); }
  // From any thread, also during a call.
  Status status() const;
  // From any thread: as of the end of the last call.
  EngineTraffic traffic() const { return posted_.enabled() ? published_.load() : traffic_; }
  // The threads that have messages.
  PostedMessages& posted() { return posted_; }

  // A task that runs the plan of `job`, alone or as part of another task.
  PlanTask plan_task(const Job& job) {
    return {peers_, dispatcher_, job, scratch(job.schedule->plan.scratch * job.element_bytes)};
  }
  MismatchProtocol& mismatches() { return mismatches_; }
  // Throws PeerLost, which blames `peer`, unless what it sent is valid.
  void require_valid(int peer, bool valid, std::string_view what) const {
    peers_.require_valid(peer, valid, what);
  }
  // Wakes `peer`, which shares memory with this rank, if it sleeps.
  void wake_peer(int peer) { peers_.at(peer).link->channel().wake_peer(); }
  // Memory that a task may use until it is done.
  transport::Bytes scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return {scratch_.data(), bytes};
  }

 private:
  // True, unless it yielded: then call it again for the same message.
  bool drive(PostedMessages::Message& message, const transport::Header& header,
             const Deadline& deadline, std::span<const size_t> peer_counts);
  void end_call(const Task* ended) noexcept;
  void exchange_heartbeats() noexcept;

  std::mutex turn_;
  PeerTable peers_;
  CallSequence calls_;
  Mailbox mailbox_;
  Liveness liveness_;
  MismatchProtocol mismatches_;
  FrameDispatcher dispatcher_;
  Shutdown shutdown_;
  PostedMessages posted_;
  ProgressLoop loop_;
  Messenger messenger_;
  std::atomic<bool> heartbeat_due_{false};  // heartbeat() was called during a call
  EngineTraffic traffic_;                   // as of the end of the last call
  Published<EngineTraffic> published_;      // the same, with thread_multiple
  std::vector<std::byte> scratch_;
};

}  // namespace pycomm::engine
