#include "engine/engine.h"

#include <poll.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace pycomm::engine {
namespace {

// Waits until one of them closes its connection, as every rank does at its end, or for 10 ms.
void wait_for_close(PeerTable& peers, const std::vector<int>& awaited) {
  std::vector<pollfd> polled;
  std::vector<transport::Channel*> armed;
  for (const int peer : awaited) {
    if (!peers.at(peer).link || peers.at(peer).link->channel().is_closed()) continue;
    armed.push_back(&peers.at(peer).link->channel());
    polled.push_back(armed.back()->arm({}));
  }
  peers.wake_event().wait(polled, std::chrono::milliseconds(10));
  for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(polled[i].revents);
}

// Polls the descriptor, because some channels detect a closed connection only by it.
bool look_for_close(PeerTable& peers, int peer) {
  if (peers.has_closed(peer)) return true;
  transport::Channel& channel = peers.at(peer).link->channel();
  std::vector<pollfd> polled{channel.arm({})};
  peers.wake_event().wait(polled, {});
  channel.disarm(polled[0].revents);
  ProcessWatch& processes = peers.processes();
  if (!peers.at(peer).left_reason) processes.look(peer);
  if (processes.pending()) processes.update();
  return peers.has_closed(peer);
}

// Whether a clean goodbye follows the frame at the front, which the next call may read.
bool closed_cleanly(Link& link) {
  const auto goodbye = link.behind_front(transport::FrameKind::goodbye);
  return goodbye && is_clean_goodbye(*goodbye);
}

void poll_for_failures(PeerTable& peers, FrameDispatcher& dispatcher,
                       const std::vector<int>& awaited) {
  for (int peer = 0; peer < peers.size(); ++peer) {
    const Peer& state = peers.at(peer);
    if (!state.link) continue;
    const bool last = std::ranges::count(awaited, peer) > 0 && look_for_close(peers, peer);
    const transport::Header* header = dispatcher.front_behind_heartbeats(peer);
    if (header != nullptr && header->kind == transport::FrameKind::goodbye)
      dispatcher.read_notice(peer, *header);
    if (last && !state.left_reason && (header == nullptr || !closed_cleanly(*state.link)))
      dispatcher.throw_peer_error(peer);
  }
}

// What a thread checks while another one drives its message. If it cannot wait longer, it ends the
// call of the driver, and the group breaks.
class MessageWait {
 public:
  MessageWait(ProgressLoop& loop, const PeerTable& peers, const transport::Header& header,
              const Deadline& deadline)
      : loop_(loop), peers_(peers), header_(header), deadline_(deadline) {}

  void check(const Task& task) {
    if (ended_) return;
    const std::string& name = peers_.name(peers_.rank());
    if (loop_.interrupted())
      end(GroupBroken(name + " was interrupted"));
    else if (deadline_.expired())
      end(loop_.timed_out(task, deadline_));
  }
  void throw_ended() const {
    if (ended_) throw *ended_;
  }

 private:
  void end(const Error& error) {
    const std::string op(name_of(static_cast<Operation>(header_.operation)));
    ended_ = Error(error.kind(), op + ": " + error.what(),
                   {.op = op,
                    .rank = peers_.rank(),
                    .peer = error.fields().peer,
                    .elapsed_s = deadline_.elapsed_s()});
    loop_.stop().request(ended_->what());
  }

  ProgressLoop& loop_;
  const PeerTable& peers_;
  const transport::Header& header_;
  const Deadline& deadline_;
  std::optional<Error> ended_;
};

}  // namespace

Engine::Engine(std::vector<std::unique_ptr<transport::Channel>> channels, EngineOptions options)
    : peers_({options.rank, std::move(options.names), std::move(options.pids)}, std::move(channels),
             options.connector),
      mailbox_(peers_, calls_),
      liveness_(peers_, calls_, options.heartbeat),
      mismatches_(peers_, calls_, mailbox_),
      dispatcher_(peers_, calls_, mailbox_, liveness_, mismatches_, options.thread_multiple),
      shutdown_(peers_, calls_, liveness_, dispatcher_),
      posted_(options.thread_multiple, calls_, mailbox_, peers_.wake_event()),
      loop_({options.spin, std::move(options.interrupted)}, turn_, peers_, mailbox_, liveness_,
            dispatcher_, posted_),
      messenger_(*this, peers_, calls_, mailbox_, dispatcher_) {}

bool Engine::can_send_at_once(int to, size_t bytes) {
  if (posted_.enabled()) return false;  // a collective of another thread may begin before
  const std::lock_guard turn(turn_);
  const Peer& peer = peers_.at(to);
  return bytes <= transport::kSegmentBytes && peer.link && !peer.left_reason && peer.link->idle() &&
         peer.link->channel().has_space(sizeof(transport::Header) + bytes);
}

void Engine::run(Task& task, const transport::Header& header, const Deadline& deadline,
                 std::span<const size_t> peer_counts) {
  PostedMessages::Message message{.task = task};
  if (!posted_.enabled()) return (void)drive(message, header, deadline, peer_counts);
  if (!is_message(header)) {
    const PostedMessages::Driver driver(posted_);
    return (void)drive(message, header, deadline, peer_counts);
  }
  MessageWait wait(loop_, peers_, header, deadline);
  try {
    posted_.run(
        message, [&] { return drive(message, header, deadline, {}); }, [&] { wait.check(task); });
  } catch (const Error&) {
    wait.throw_ended();
    throw;
  }
  wait.throw_ended();
}

bool Engine::drive(PostedMessages::Message& message, const transport::Header& header,
                   const Deadline& deadline, std::span<const size_t> peer_counts) {
  const std::lock_guard turn(turn_);
  shutdown_.check_usable();
  check(calls_.running() == nullptr && (posted_.enabled() || !mailbox_.awaits()),
        "a call began inside another");
  const bool is_collective = !is_message(header);
  struct End {
    Engine& engine;
    const Task* task;
    ~End() { engine.end_call(task); }
  } end{*this, &message.task};
  bool done = false;
  if (is_collective) calls_.begin(header, peer_counts);
  liveness_.enter_call(header);
  try {
    posted_.enabled() ? posted_.begin(message) : message.task.begin();
    done = loop_.drive(message.task, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::mismatch) throw;
    shutdown_.fail_call(error, header, deadline);
  } catch (const std::exception& error) {  // thrown by `interrupted`, or out of memory
    const auto operation = static_cast<Operation>(header.operation);
    shutdown_.fail(InternalError(std::string(name_of(operation)) + ": " + error.what()));
    throw;
  }
  if (!done) end.task = nullptr;
  if (is_collective) calls_.complete(header);
  return done;
}

// `ended`: the task; null if it yielded.
void Engine::end_call(const Task* ended) noexcept {
  liveness_.leave_call();
  calls_.end();
  if (ended != nullptr && mailbox_.is_used())
    mailbox_.end_receives(ended, ended->can_be_suspended());
  if (posted_.enabled() && broken()) {
    try {
      shutdown_.check_usable();
    } catch (const Error& error) {
      posted_.fail(error);
    }
  }
  if (heartbeat_due_.load(std::memory_order_relaxed)) {
    heartbeat_due_.store(false, std::memory_order_relaxed);
    exchange_heartbeats();
  }
  traffic_ = {};
  traffic_.waited = loop_.waited();
  for (const Peer& peer : peers_.all()) {
    if (!peer.link) continue;
    const LinkTraffic& one = peer.link->traffic();
    traffic_.frames_sent += one.frames_sent;
    traffic_.payload_sent += one.payload_sent;
    traffic_.bytes_written += one.bytes_written;
    traffic_.bytes_received += one.bytes_received;
  }
  if (posted_.enabled()) published_.store(traffic_);
}

bool Engine::heartbeat() noexcept {
  const std::unique_lock turn(turn_, std::try_to_lock);
  turn ? exchange_heartbeats() : heartbeat_due_.store(true, std::memory_order_relaxed);
  return !broken();
}

void Engine::exchange_heartbeats() noexcept {
  if (broken()) return;
  try {
    (void)peers_.accept();  // a peer that connected to this rank waits for a heartbeat
    const auto now = Clock::now();
    for (int peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_.at(peer).link) continue;
      const transport::Header* const waiting = dispatcher_.front_behind_heartbeats(peer);
      (void)liveness_.note_bytes(peer);
      // A frame that stays for the next call hides the heartbeats behind it.
      if (waiting != nullptr) peers_.at(peer).silent_since = now;
    }
    liveness_.send(now);
    liveness_.update(now);
  } catch (...) {  // the next call reports the error of a link
  }
}

void Engine::check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited) {
  std::unique_lock turn(turn_, std::try_to_lock);
  const Deadline deadline(limit);
  while (!turn && !deadline.expired()) {
    std::this_thread::yield();
    (void)turn.try_lock();
  }
  shutdown_.check_usable();
  // No lock, or a call that calls `interrupted`: that call checks.
  if (!turn || calls_.running() != nullptr || mailbox_.awaits()) return;
  try {
    poll_for_failures(peers_, dispatcher_, awaited);
    while (!deadline.expired()) {
      wait_for_close(peers_, awaited);
      poll_for_failures(peers_, dispatcher_, awaited);
    }
  } catch (const Error& error) {
    shutdown_.fail(error);
    throw;
  }
}

void Engine::leave(std::chrono::nanoseconds wait,
                   const std::function<bool()>& interrupted) noexcept {
  const std::lock_guard turn(turn_);
  shutdown_.leave(wait, interrupted);
}

void Engine::fail(const Error& error) noexcept {
  const std::lock_guard turn(turn_);
  shutdown_.fail(error);
}

Status Engine::status() const {
  Status now = liveness_.status();
  now.broken = shutdown_.cause();
  now.lost = shutdown_.lost();
  return now;
}

}  // namespace pycomm::engine
