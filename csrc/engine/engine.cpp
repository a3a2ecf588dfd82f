#include "engine/engine.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "core/cpu_relax.h"
#include "core/operation.h"
#include "engine/tasks.h"

namespace pycomm {
namespace {

// Minimum time between calls of `interrupted`: it may wait for a lock (the GIL).
constexpr std::chrono::milliseconds kInterruptInterval{50};
constexpr int kPollsPerClock = 32, kStepsPerClock = 1024;
// Frames of one peer per poll: a peer that sends without pause delays no other.
constexpr int kFramesPerPoll = 4;
// After a sleep shorter than this, spinning would have ended the wait sooner.
constexpr std::chrono::microseconds kShortSleep{200};

// The hash of the calls so far (`past`) and of `call`. The count of an all_to_all differs by rank.
uint64_t followed_by(uint64_t past, const Header& call) {
  const bool to_all = call.operation == static_cast<uint8_t>(Operation::all_to_all);
  const uint64_t what = uint64_t{call.operation} | uint64_t{call.dtype} << 8 |
                        uint64_t{call.op} << 16 | uint64_t{call.algorithm} << 24 |
                        uint64_t{call.peer} << 32;
  for (const uint64_t word : {what, to_all ? 0 : call.count}) {
    past = (past ^ 0xcbf29ce484222325 ^ word) * 0x9e3779b97f4a7c15;
    past ^= past >> 32;
  }
  return past;
}

// Releases the turn for its lifetime, so that heartbeat() may use the links.
struct ReleasedTurn {
  explicit ReleasedTurn(std::mutex& turn) : mutex(turn) { mutex.unlock(); }
  ReleasedTurn(const ReleasedTurn&) = delete;
  ReleasedTurn& operator=(const ReleasedTurn&) = delete;
  ~ReleasedTurn() { mutex.lock(); }
  std::mutex& mutex;
};

// Adds the time since `since` to a sum, also when the wait throws.
struct WaitTimer {
  std::chrono::nanoseconds& sum;
  Clock::time_point since;
  WaitTimer(std::chrono::nanoseconds& to, Clock::time_point from) : sum(to), since(from) {}
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;
  ~WaitTimer() { sum += Clock::now() - since; }
};

}  // namespace

int order(const Header& frame, uint16_t epoch, uint32_t sequence) {
  if (const auto d = static_cast<int16_t>(frame.epoch - epoch); d != 0) return d < 0 ? -1 : 1;
  const auto d = static_cast<int32_t>(frame.sequence - sequence);
  return d == 0 ? 0 : d < 0 ? -1 : 1;
}

bool same_call(const Header& a, const Header& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.op == b.op &&
         a.algorithm == b.algorithm && a.peer == b.peer && a.count == b.count;
}

Engine::Engine(std::vector<std::unique_ptr<Channel>> channels, EngineOptions options)
    : options_(std::move(options)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  peers_.resize(channels.size());
  for (size_t i = 0; i < channels.size(); ++i) {
    if (!channels[i]) continue;
    peers_[i].link = std::make_unique<Link>(std::move(channels[i]));
    watch_process(static_cast<int>(i));
  }
}

Engine::~Engine() { leave(); }

EngineTraffic Engine::traffic() const {
  const std::lock_guard turn(turn_);
  EngineTraffic sums{.payload_sent = payload_sent_, .waited = waited_};
  for (const PeerState& peer : peers_) {
    if (!peer.link) continue;
    sums.frames_sent += peer.link->frames_sent();
    sums.bytes_written += peer.link->bytes_written();
    sums.bytes_received += peer.link->bytes_received();
  }
  return sums;
}

Bytes Engine::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return {scratch_.data(), bytes};
}

void Engine::run(const PlanJob& job, const Deadline& deadline) {
  const Header header = next_header(job.signature);
  PlanTask task(*this, job, header);
  peer_counts_ = job.peer_counts;
  run(task, header, deadline);
}

Header Engine::next_header(Header signature) const {
  signature.epoch = epoch_;
  signature.sequence = sequence_;
  signature.context = static_cast<uint16_t>(past_);
  return signature;
}

void Engine::run(Task& task, const Header& header, const Deadline& deadline) {
  running_ = &header;
  guard(task, header, deadline);
  ++sequence_;
  past_ = followed_by(past_, header);
  before_ = header;
}

// Runs the task. An error other than Mismatch breaks the engine.
void Engine::guard(Task& task, const Header& signature, const Deadline& deadline) {
  const std::lock_guard turn(turn_);
  last_ = signature;
  last_.sequence = sequence_;
  last_.kind = FrameKind::heartbeat;
  last_.context = static_cast<uint16_t>(CallState::in_call);
  struct Clear {
    Engine& engine;
    ~Clear() {
      engine.last_.context = static_cast<uint16_t>(CallState::idle);
      engine.running_ = nullptr;
      engine.peer_counts_ = {};
      engine.detach_partial_messages();
      engine.awaited_.clear();
      engine.sending_ = false;
      if (!engine.heartbeat_due_.load(std::memory_order_relaxed)) return;
      engine.heartbeat_due_.store(false, std::memory_order_relaxed);
      (void)engine.send_heartbeats_locked();
    }
  } const clear{*this};
  check_usable();
  try {
    if (stopped_.load()) check_abort_conditions(task, deadline);
    drive(task, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::mismatch) throw;
    ErrorFields fields = error.fields();
    fields.op = name_of(static_cast<Operation>(signature.operation));
    fields.rank = options_.rank;
    fields.elapsed_s = deadline.elapsed_s();
    std::string text = error.what();
    if (!text.starts_with(fields.op + ": ")) text.insert(0, fields.op + ": ");
    if (error.kind() == ErrorKind::timeout && running_ != nullptr) {
      const auto missing = find_unresponsive_peers(error);
      for (const int peer : missing)
        text += (peer == missing[0] ? "; missing from this call: " : ", ") + name(peer) +
                describe_peer(at(peer));
      if (!missing.empty()) fields.peer = missing[0];
      const auto unmet = std::ranges::count_if(peers_, [](const auto& p) { return !p.link; });
      if (unmet > 1)  // this rank is one of them
        text += "; not connected and not checked: " + std::to_string(unmet - 1) + " ranks";
    }
    const Error reported(error.kind(), text, fields);
    abort(reported);
    throw reported;
  } catch (const std::exception& error) {  // thrown by `interrupted`, or out of memory
    abort(InternalError(std::string(name_of(static_cast<Operation>(signature.operation))) + ": " +
                        error.what()));
    throw;
  }
}

void Engine::drive(Task& task, const Deadline& deadline) {
  int polls = 0, steps = 0;
  Clock::time_point idle_since{}, idle_until{};
  while (!task.done()) {
    if (task.advance()) {
      waited_ += idle_until - idle_since;
      idle_since = idle_until = {};
      if (++steps % kStepsPerClock == 0) check_abort_conditions(task, deadline);
      continue;
    }
    // Spin first: a peer often answers sooner than a sleeping thread wakes up.
    if (options_.spin.count() > 0 && worth_spinning(task)) {
      cpu_relax();
      if (++polls % kPollsPerClock != 0) continue;
      idle_until = Clock::now();
      if (idle_since == Clock::time_point{}) {
        idle_since = idle_until;
        spin_limit_ = std::max(options_.spin, spin_limit_ - spin_limit_ / 8);
      }
      if (idle_until - idle_since < spin_limit_) continue;
    }
    bool moved = false;
    {
      const auto since = idle_since == Clock::time_point{} ? Clock::now() : idle_since;
      const WaitTimer waiting{waited_, since};
      moved = sleep(task, deadline);
    }
    adapt_spin_limit(idle_since);
    idle_since = idle_until = {};
    if (!task.done()) check_between_sleeps(task, deadline, moved);
  }
}

// Between two sleeps. The checks run also after progress: otherwise a peer that sends a few bytes
// at a time would delay signals, timeouts, aborts and this rank's heartbeats.
void Engine::check_between_sleeps(const Task& task, const Deadline& deadline, bool moved) {
  if (!moved) check_peers_needed(task);
  check_abort_conditions(task, deadline);
  if (!moved) check_heartbeats(task);
}

// Sets how long the next wait spins. Two ranks that both sleep after `spin` could miss each other
// repeatedly, because waking up takes longer than that. After a short sleep a rank therefore spins
// twice as long, and gradually less from then on. A sleep without spinning changes nothing.
void Engine::adapt_spin_limit(Clock::time_point idle_since) {
  if (idle_since == Clock::time_point{}) return;
  const auto idle = Clock::now() - idle_since;
  spin_limit_ = idle < kShortSleep ? std::max<std::chrono::nanoseconds>(spin_limit_, 2 * idle)
                                   : options_.spin;
}

// False where polling costs more than a sleep: while much data is in transit on a socket.
bool Engine::worth_spinning(const Task& task) const {
  const int from = task.receiving_from(), peer = from != kNoRank ? from : task.sending_to();
  if (peer < 0 || (from != kNoRank && task.receiving_bytes() < kSegmentBytes)) return true;
  const auto& link = peers_[static_cast<size_t>(peer)].link;
  return !link || !link->channel().polling_is_expensive();
}

// Arms, polls once more, and only then sleeps, so that no wake-up is lost. True on progress.
bool Engine::sleep(Task& task, const Deadline& deadline) {
  polled_.assign(1, {wake_.get(), POLLIN, 0});
  if (options_.connector) polled_.push_back({options_.connector->descriptor(), POLLIN, 0});
  const size_t first_process = polled_.size();
  watched_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Fd& process = peers_[i].process.descriptor();
    if (!process || peers_[i].left_reason) continue;
    watched_.push_back(static_cast<int>(i));
    polled_.push_back({process.get(), POLLIN, 0});
  }
  armed_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    const PeerState& peer = peers_[i];
    if (!peer.link || peer.link->channel().is_closed()) continue;
    armed_.push_back(&peer.link->channel());
    const bool awaited = task.receiving_from() == static_cast<int>(i);
    polled_.push_back(armed_.back()->arm({.receive = !must_wait(static_cast<int>(i), task),
                                          .send = !peer.link->idle(),
                                          .bytes = awaited ? task.receiving_bytes() : 1}));
  }
  struct Disarm {
    Engine& engine;
    Task& task;
    ~Disarm() {
      task.disarm();
      for (size_t i = 0; i < engine.armed_.size(); ++i)
        engine.armed_[i]->disarm(
            engine.polled_[engine.polled_.size() - engine.armed_.size() + i].revents);
    }
  };
  int woken = 1;
  {
    const Disarm disarm{*this, task};
    task.arm();
    if (task.advance()) return true;
    if (!poll_peers()) {
      const auto limit = longest_sleep(deadline);
      woken = ::poll(polled_.data(), polled_.size(),
                     static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
    }
  }
  if (woken > 0) find_ended(first_process);
  if (process_ended_) update_ended();
  if (woken <= 0) interrupt_checked_at_ = {};  // a signal, or the poll timed out
  if (woken == 0 && task.receiving_from() >= 0) request_connection(task.receiving_from());
  // Received data takes precedence over a goodbye behind it.
  if (task.advance()) return true;
  (void)poll_peers();
  return task.done() || task.advance();
}

void Engine::check_abort_conditions(const Task& task, const Deadline& deadline) {
  if (stopped_.load()) {
    const std::lock_guard lock(mutex_);
    throw GroupBroken("the group was aborted: " + stop_reason_);
  }
  const auto now = Clock::now();
  send_heartbeats(now);
  if (options_.interrupted && now - interrupt_checked_at_ >= kInterruptInterval) {
    interrupt_checked_at_ = now;
    const ReleasedTurn released{turn_};
    if (options_.interrupted()) throw GroupBroken(name(options_.rank) + " was interrupted");
  }
  if (!deadline.expired()) return;
  const int from = task.receiving_from(), to = task.sending_to();
  const int peer = from != kNoRank ? from : to;
  std::string text = "Timed out after " + std::to_string(deadline.limit_s()) + " s";
  if (peer != kNoRank)
    text += (from != kNoRank ? ", waiting for data from " : ", waiting to send to ") + name(peer);
  if (awaited_peer() == kAnyPeer) text += ", waiting for a message from any rank";
  throw Timeout(text, {.peer = peer});
}

// A peer that left cleanly is an error only for a rank that still needs data from it or for it.
void Engine::check_peers_needed(const Task& task) {
  const int from = task.receiving_from();
  // No message can follow a frame of a later call; a collective would detect the mismatch.
  if (running_ == nullptr && from >= 0 && at(from).link && over(at(from)) &&
      !at(from).left_reason && at(from).link->has_front() && at(from).front == Front::later)
    throw_peer_error(from);
  for (const int peer : {task.receiving_from(), task.sending_to()})
    if (peer != kNoRank && at(peer).left_reason) throw peer_lost(peer);
  if (awaited_peer() == kAnyPeer && options_.connector == nullptr &&
      std::ranges::all_of(peers_,
                          [](const PeerState& state) { return !state.link || state.left_reason; }))
    throw PeerLost("all other ranks left the group, and none sent a message before");
}

// The sender opens the connection. A receiver opens it too after its first sleep without progress:
// without a connection it could not detect that the peer died.
void Engine::request_connection(int peer) {
  PeerState& state = at(peer);
  if (state.link || state.requested || state.left_reason || options_.connector == nullptr) return;
  state.requested = true;
  state.last_received_at = Clock::now();
  options_.connector->request(peer);
}

// True if a peer connected or turned out to be unreachable.
bool Engine::accept_connections() {
  if (options_.connector == nullptr) return false;
  std::vector<ConnectResult> arrivals = options_.connector->take();
  for (ConnectResult& arrival : arrivals) {
    PeerState& state = at(arrival.peer);
    if (state.link) continue;
    if (!arrival.channel) {
      state.left_reason = "cannot be reached: " + arrival.why + "; it died or left the group";
      continue;
    }
    state.link = std::make_unique<Link>(std::move(arrival.channel));
    state.last_received_at = Clock::now();
    watch_process(arrival.peer);
    if (!last_mismatch_text_.empty()) state.link->post(last_mismatch_, last_mismatch_text_);
  }
  return !arrivals.empty();
}

bool Engine::poll_peers() {
  bool moved = accept_connections();
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].link) continue;
    Link& link = *peers_[i].link;
    const bool unsent = !link.idle();
    (void)link.flush();
    moved |= unsent && link.idle();
    (void)poll_peer(static_cast<int>(i));
    if (link.bytes_received() == peers_[i].bytes_received_seen) continue;
    moved = true;
    peers_[i].bytes_received_seen = link.bytes_received();
    peers_[i].last_received_at = Clock::now();
    if (process_ended_) peers_[i].last_byte_at = peers_[i].last_received_at;
  }
  return moved;
}

// True if the frame at the front must stay there: bytes that arrive behind it are no progress.
bool Engine::must_wait(int peer, const Task& task) {
  const Front front = at(peer).front;
  return at(peer).link->has_front() &&
         (front == Front::later || (front == Front::ours && task.receiving_from() != peer));
}

// Handles the frames received from `peer` until one that belongs to a call is at the front.
Engine::Front Engine::poll_peer(int peer) {
  PeerState& state = at(peer);
  if (!state.link) return Front::nothing;
  Link& link = *state.link;
  for (int frames = 0; frames < kFramesPerPoll; ++frames) {
    const bool last = over(state);  // checked first: all that it sent before has arrived now
    const Header* header = this->front(peer);
    const Front front = header == nullptr ? Front::nothing : dispatch_frame(peer, *header);
    state.front = front;
    const bool waits = header == nullptr || link.payload_left() > 0;
    if (front == Front::later || (front == Front::ours && !waits)) return front;
    if (!waits) continue;
    const bool cut = header == nullptr || link.peek().size() < link.payload_left();
    if (last && !state.left_reason && cut) throw peer_lost(peer);
    return front;
  }
  return Front::nothing;
}

// Handles the frame at the front, or classifies it. Front::nothing: handled as far as it arrived.
Engine::Front Engine::dispatch_frame(int peer, const Header& header) {
  switch (header.kind) {
    case FrameKind::data:
      at(peer).last = header;
      break;
    case FrameKind::heartbeat:
      take_heartbeat(peer, header);
      if (contradicts_run(*at(peer).last)) throw_mismatch(peer, *at(peer).last);
      return Front::nothing;
    case FrameKind::mismatch:
      // A notice stays for later if it is about a later call or epoch, or, while this rank is in no
      // collective, about this epoch and would end a message that is being sent. A notice of an
      // earlier epoch must be removed.
      if (const int when = order(header, epoch_, sequence_);
          when > 0 || (running_ == nullptr && header.epoch == epoch_ &&
                       (when == 0 || !only_awaits() || has_announced_to_other(peer))))
        return Front::later;
      [[fallthrough]];
    case FrameKind::goodbye:
      read_notice(peer, header);
      return Front::nothing;
  }
  if (!is_message(header)) return dispatch_data(peer, header);
  if (!has_buffer_space(peer, header)) return Front::later;
  buffer_message(peer, header);
  return Front::nothing;
}

Engine::Front Engine::dispatch_data(int peer, const Header& header) {
  Link& link = *at(peer).link;
  const int when = order(header, epoch_, sequence_);
  if (when < 0) {
    if (header.epoch != epoch_) {  // belongs to a call that failed
      link.discard();
      (void)front(peer);
      return Front::nothing;
    }
    // It sent more than this rank's call received. That must not end a message in transit.
    if (running_ == nullptr && (!only_awaits() || has_announced_to_other(peer)))
      return Front::later;
    throw_mismatch_on_end(peer, header);
  }
  if (when > 0 || running_ == nullptr) return Front::later;
  if (!same_call(header, expected_from(peer))) throw_mismatch(peer, header);
  if (header.context != running_->context) throw_mismatch_on_past(peer);
  return Front::ours;
}

// A rank that announced a message accepts mismatch errors only from its receiver: if the receiver
// takes the message, both must continue.
bool Engine::has_announced_to_other(int peer) const {
  return is_answer(awaited_.front().signature) && awaited_peer() != peer;
}

void Engine::take_heartbeat(int peer, const Header& header) {
  require_valid(peer, header.bytes == 0, "a heartbeat has a payload");
  at(peer).last = header;
  at(peer).link->finish();
}

// Whether the sender of the heartbeat waits in a different call than this rank. A heartbeat of an
// all_to_all does not carry the counts between the two.
bool Engine::contradicts_run(const Header& heartbeat) const {
  if (running_ == nullptr || heartbeat.context != static_cast<uint16_t>(CallState::in_call) ||
      is_message(heartbeat) || order(heartbeat, epoch_, sequence_) != 0)
    return false;
  const auto to_all = static_cast<uint8_t>(Operation::all_to_all);
  if (heartbeat.operation == to_all && running_->operation == to_all) return false;
  return !same_call(heartbeat, *running_);
}

// The header that the frames of `peer` must have in the current run.
Header Engine::expected_from(int peer) const {
  Header header = *running_;
  if (!peer_counts_.empty()) header.count = peer_counts_[peers_.size() + static_cast<size_t>(peer)];
  return header;
}

Link* Engine::incoming(int peer) {
  const Front front = poll_peer(peer);
  Link* link = at(peer).link.get();  // null: not connected yet
  if (front == Front::ours) return link;
  if (front != Front::later || running_ == nullptr) return nullptr;
  // A frame of a later call: the peer completed this call without sending what this rank waits for.
  const Header& next = *link->front();
  if (next.epoch == epoch_ && next.kind == FrameKind::data) throw_mismatch_on_end(peer, next);
  return nullptr;
}

bool Engine::open(int peer, const Header& header, ConstBytes payload, bool more) {
  if (!at(peer).link) request_connection(peer);
  if (!at(peer).link || at(peer).left_reason) return false;
  Link& link = *at(peer).link;
  if (over(at(peer)))
    throw_peer_error(peer);  // a rank that only sends would not detect it otherwise
  if (!link.idle() && !link.flush()) return false;
  link.begin(header, payload, more);
  return true;
}

size_t Engine::push(int peer) {
  const size_t n = at(peer).link->push();
  payload_sent_ += n;
  return n;
}

}  // namespace pycomm
