#include "engine/engine.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "core/cpu_relax.h"
#include "core/operation.h"
#include "engine/tasks.h"

namespace pycomm {
namespace {

// How often `interrupted` is asked where much happens: it may wait for a lock for long.
constexpr std::chrono::milliseconds kAsk{50};
constexpr int kLooksPerClock = 32, kStepsPerClock = 1024;
// Of one peer, before others have their turn: who sends without end holds nobody up.
constexpr int kFramesPerLook = 4;
// A wait that sleeps for less would have been over sooner, had it gone on looking.
constexpr std::chrono::microseconds kShortSleep{200};

// The hash of the calls so far, and of `call`. How much an all_to_all moves is another number on
// each rank.
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

// For as long as it lives pulse() may work with the links.
struct Rest {
  explicit Rest(std::mutex& turn) : mutex(turn) { mutex.unlock(); }
  Rest(const Rest&) = delete;
  Rest& operator=(const Rest&) = delete;
  ~Rest() { mutex.lock(); }
  std::mutex& mutex;
};

// Adds the time since `since` to a sum, however the wait ends.
struct Waiting {
  std::chrono::nanoseconds& sum;
  Clock::time_point since;
  Waiting(std::chrono::nanoseconds& to, Clock::time_point from) : sum(to), since(from) {}
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() { sum += Clock::now() - since; }
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

uint64_t Engine::sum(uint64_t (Link::*figure)() const) const {
  const std::lock_guard turn(turn_);
  uint64_t total = 0;
  for (const Peer& peer : peers_)
    if (peer.link) total += (peer.link.get()->*figure)();
  return total;
}

Bytes Engine::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return {scratch_.data(), bytes};
}

void Engine::run(const Job& job, const Deadline& deadline) {
  const Header header = next_header(job.signature);
  Run task(*this, job, header);
  claims_ = job.claims;
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

// Runs the task; whatever breaks it, other than a disagreement, breaks the engine.
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
      engine.claims_ = {};
      engine.keep_half_arrived();
      engine.awaited_.clear();
      engine.sending_ = false;
      if (!engine.beat_due_.load(std::memory_order_relaxed)) return;
      engine.beat_due_.store(false, std::memory_order_relaxed);
      (void)engine.beat();
    }
  } const clear{*this};
  check_usable();
  try {
    if (stopped_.load()) check_world(task, deadline);
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
      const auto missing = call_roll(error);
      for (const int peer : missing)
        text += (peer == missing[0] ? "; missing from this call: " : ", ") + name(peer) +
                known_of(at(peer));
      if (!missing.empty()) fields.peer = missing[0];
      if (const auto unmet = std::ranges::count_if(peers_, [](const Peer& p) { return !p.link; });
          unmet > 1)  // oneself among them
        text += "; not connected, and not asked: " + std::to_string(unmet - 1) + " ranks";
    }
    const Error told(error.kind(), text, fields);
    give_up(told);
    throw told;
  } catch (const std::exception& error) {  // of `interrupted`, or out of memory
    give_up(InternalError(std::string(name_of(static_cast<Operation>(signature.operation))) + ": " +
                          error.what()));
    throw;
  }
}

void Engine::drive(Task& task, const Deadline& deadline) {
  int looks = 0, steps = 0;
  Clock::time_point idle_since{}, idle_until{};
  while (!task.done()) {
    if (task.advance()) {
      waited_ += idle_until - idle_since;
      idle_since = idle_until = {};
      if (++steps % kStepsPerClock == 0) check_world(task, deadline);
      continue;
    }
    // Look again for a while: a peer that is about to answer does so sooner than a sleeper wakes.
    if (options_.spin.count() > 0 && worth_looking(task)) {
      cpu_relax();
      if (++looks % kLooksPerClock != 0) continue;
      idle_until = Clock::now();
      if (idle_since == Clock::time_point{}) {
        idle_since = idle_until;
        patience_ = std::max(options_.spin, patience_ - patience_ / 8);
      }
      if (idle_until - idle_since < patience_) continue;
    }
    bool moved = false;
    {
      const Waiting waiting{waited_, idle_since == Clock::time_point{} ? Clock::now() : idle_since};
      moved = sleep(task, deadline);
    }
    learn(idle_since);
    idle_since = idle_until = {};
    if (!task.done()) look_round(task, deadline, moved);
  }
}

// Between a sleep and the next: also where something came, or a peer whose bytes come a few at a
// time would hold up a signal, a limit, an abort, and this rank's signs of life.
void Engine::look_round(const Task& task, const Deadline& deadline, bool moved) {
  if (!moved) check_needed(task);
  check_world(task, deadline);
  if (!moved) check_silence(task);
}

// How long to look next time. Two ranks that both sleep after `spin` can go on so for ever, each
// waking too late for the other's look: to wake takes longer than that. Who has slept for a short
// while therefore looks for twice as long the next time, which brings the two together again; and
// bit by bit for less from then on. A sleep without a look before it teaches nothing.
void Engine::learn(Clock::time_point idle_since) {
  if (idle_since == Clock::time_point{}) return;
  const auto idle = Clock::now() - idle_since;
  patience_ =
      idle < kShortSleep ? std::max<std::chrono::nanoseconds>(patience_, 2 * idle) : options_.spin;
}

// Not where a look costs much and a sleep little: while much is on its way by a socket.
bool Engine::worth_looking(const Task& task) const {
  const int from = task.receiving_from(), peer = from != kNoRank ? from : task.sending_to();
  if (peer < 0 || (from != kNoRank && task.receiving_bytes() < kSegmentBytes)) return true;
  const auto& link = peers_[static_cast<size_t>(peer)].link;
  return !link || !link->channel().polling_is_expensive();
}

// Arms, looks once more, and only then sleeps: so no wake-up is lost. True if the task moved.
bool Engine::sleep(Task& task, const Deadline& deadline) {
  polled_.assign(1, {wake_.get(), POLLIN, 0});
  if (options_.dialer) polled_.push_back({options_.dialer->descriptor(), POLLIN, 0});
  const size_t first_process = polled_.size();
  watched_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Fd& process = peers_[i].process.descriptor();
    if (!process || peers_[i].departed) continue;
    watched_.push_back(static_cast<int>(i));
    polled_.push_back({process.get(), POLLIN, 0});
  }
  armed_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
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
    if (!tend_all()) {
      const auto limit = longest_sleep(deadline);
      woken = ::poll(polled_.data(), polled_.size(),
                     static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
    }
  }
  if (woken > 0) find_ended(first_process);
  if (ending_) settle_ended();
  if (woken <= 0) asked_ = {};  // a signal, or nothing happened for long
  if (woken == 0 && task.receiving_from() >= 0) want(task.receiving_from());
  // What is there already comes before what a peer says at its end.
  if (task.advance()) return true;
  (void)tend_all();
  return task.done() || task.advance();
}

void Engine::check_world(const Task& task, const Deadline& deadline) {
  if (stopped_.load()) {
    const std::lock_guard lock(mutex_);
    throw GroupBroken("the group was aborted: " + stop_reason_);
  }
  const auto now = Clock::now();
  say_alive(now);
  if (options_.interrupted && now - asked_ >= kAsk) {
    asked_ = now;
    const Rest rest{turn_};
    if (options_.interrupted()) throw GroupBroken(name(options_.rank) + " was interrupted");
  }
  if (!deadline.expired()) return;
  const int from = task.receiving_from(), to = task.sending_to();
  const int peer = from != kNoRank ? from : to;
  std::string text = "Timed out after " + std::to_string(deadline.limit_s()) + " s";
  if (peer != kNoRank)
    text += (from != kNoRank ? ", waiting for data from " : ", waiting to send to ") + name(peer);
  if (awaits() == kAnybody) text += ", waiting for a message from anybody";
  throw Timeout(text, {.peer = peer});
}

// Somebody who has left in peace matters only to those who still need something from it.
void Engine::check_needed(const Task& task) {
  const int from = task.receiving_from();
  // Behind what belongs to a later call no message comes; a call would see that they disagree.
  if (running_ == nullptr && from >= 0 && at(from).link && over(at(from)) && !at(from).departed &&
      at(from).link->has_front() && at(from).front == Front::later)
    hear_out(from);
  for (const int peer : {task.receiving_from(), task.sending_to()})
    if (peer != kNoRank && at(peer).departed) throw gone(peer);
  if (awaits() == kAnybody && options_.dialer == nullptr &&
      std::ranges::all_of(peers_, [](const Peer& who) { return !who.link || who.departed; }))
    throw PeerLost("everybody else has left the group, and no message came before");
}

// Whoever sends calls. Who has waited for long to receive calls too: for all it knows the other has
// died, and of a rank that one never met one learns it only so.
void Engine::want(int peer) {
  Peer& who = at(peer);
  if (who.link || who.wanted || who.departed || options_.dialer == nullptr) return;
  who.wanted = true;
  who.heard = Clock::now();
  options_.dialer->want(peer);
}

// True if somebody was met, or is not to be had.
bool Engine::admit() {
  if (options_.dialer == nullptr) return false;
  std::vector<Arrival> arrivals = options_.dialer->take();
  for (Arrival& arrival : arrivals) {
    Peer& who = at(arrival.peer);
    if (who.link) continue;
    if (!arrival.channel) {
      who.departed = "cannot be reached: " + arrival.why + "; it has died, or left the group";
      continue;
    }
    who.link = std::make_unique<Link>(std::move(arrival.channel));
    who.heard = Clock::now();
    watch_process(arrival.peer);
    if (!noticed_text_.empty()) who.link->post(noticed_, noticed_text_);
  }
  return !arrivals.empty();
}

bool Engine::tend_all() {
  bool moved = admit();
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].link) continue;
    Link& link = *peers_[i].link;
    const bool owed = !link.idle();
    (void)link.flush();
    moved |= owed && link.idle();
    (void)tend(static_cast<int>(i));
    if (link.bytes_received() == peers_[i].seen) continue;
    moved = true;
    peers_[i].seen = link.bytes_received();
    peers_[i].heard = Clock::now();
    if (ending_) peers_[i].quiet_since = peers_[i].heard;
  }
  return moved;
}

// True if the frame at the front has to stay there, so that what arrives behind it is no news.
bool Engine::must_wait(int peer, const Task& task) {
  const Front front = at(peer).front;
  return at(peer).link->has_front() &&
         (front == Front::later || (front == Front::ours && task.receiving_from() != peer));
}

// Deals with what has arrived from `peer` until something is at the front that belongs to a call.
Engine::Front Engine::tend(int peer) {
  Peer& who = at(peer);
  if (!who.link) return Front::nothing;
  Link& link = *who.link;
  for (int frames = 0; frames < kFramesPerLook; ++frames) {
    const bool last = over(who);  // looked at first: what it sent before is there now
    const Header* header = this->front(peer);
    const Front front = header == nullptr ? Front::nothing : judge(peer, *header);
    who.front = front;
    const bool waits = header == nullptr || link.payload_left() > 0;
    if (front == Front::later || (front == Front::ours && !waits)) return front;
    if (!waits) continue;
    if (last && !who.departed && (header == nullptr || link.peek().size() < link.payload_left()))
      throw gone(peer);
    return front;
  }
  return Front::nothing;
}

// What the frame at the front means here. Front::nothing: it was dealt with, as far as it has
// arrived.
Engine::Front Engine::judge(int peer, const Header& header) {
  switch (header.kind) {
    case FrameKind::data:
      at(peer).last = header;
      break;
    case FrameKind::heartbeat:
      take_pulse(peer, header);
      if (contradicts(*at(peer).last)) disagree(peer, *at(peer).last);
      return Front::nothing;
    case FrameKind::mismatch:
      // Of a call that we have yet to make, or of an epoch that we have yet to hear of; and a
      // message that we send is not cut by one of the past. What we know already must not stay in
      // the way.
      if (const int when = order(header, epoch_, sequence_);
          when > 0 || (running_ == nullptr && header.epoch == epoch_ &&
                       (when == 0 || !only_awaits() || has_offered_past(peer))))
        return Front::later;
      [[fallthrough]];
    case FrameKind::goodbye:
      read_notice(peer, header);
      return Front::nothing;
  }
  if (!is_message(header)) return judge_data(peer, header);
  if (!has_room(peer, header)) return Front::later;
  absorb(peer, header);
  return Front::nothing;
}

Engine::Front Engine::judge_data(int peer, const Header& header) {
  Link& link = *at(peer).link;
  const int when = order(header, epoch_, sequence_);
  if (when < 0) {
    if (header.epoch != epoch_) {  // of a call that failed
      link.discard();
      (void)front(peer);
      return Front::nothing;
    }
    // It sent more than our call took. A message on its way to us or from us is not cut by that.
    if (running_ == nullptr && (!only_awaits() || has_offered_past(peer))) return Front::later;
    disagree_on_end(peer, header);
  }
  if (when > 0 || running_ == nullptr) return Front::later;
  if (!same_call(header, expected_from(peer))) disagree(peer, header);
  if (header.context != running_->context) disagree_on_past(peer);
  return Front::ours;
}

// Who has offered a message is bound to what its receiver makes of it, whatever others say: where
// that one takes it, both must go on.
bool Engine::has_offered_past(int peer) const {
  return is_answer(awaited_.front().signature) && awaits() != peer;
}

void Engine::take_pulse(int peer, const Header& header) {
  believe(peer, header.bytes == 0, "a pulse has a payload");
  at(peer).last = header;
  at(peer).link->finish();
}

// Whether its sender waits in another call than ours, perhaps for us while we wait for it. Of an
// all_to_all a pulse does not tell the counts between the two.
bool Engine::contradicts(const Header& pulse) const {
  if (running_ == nullptr || pulse.context != static_cast<uint16_t>(CallState::in_call) ||
      is_message(pulse) || order(pulse, epoch_, sequence_) != 0)
    return false;
  const auto to_all = static_cast<uint8_t>(Operation::all_to_all);
  if (pulse.operation == to_all && running_->operation == to_all) return false;
  return !same_call(pulse, *running_);
}

// The run under way, as the frames of `peer` must tell it.
Header Engine::expected_from(int peer) const {
  Header header = *running_;
  if (!claims_.empty()) header.count = claims_[peers_.size() + static_cast<size_t>(peer)];
  return header;
}

Link* Engine::incoming(int peer) {
  const Front front = tend(peer);
  Link* link = at(peer).link.get();  // null: not met yet
  if (front == Front::ours) return link;
  if (front != Front::later || running_ == nullptr) return nullptr;
  // What it sent for our call came before this: it has gone on without what we wait for.
  const Header& next = *link->front();
  if (next.epoch == epoch_ && next.kind == FrameKind::data) disagree_on_end(peer, next);
  return nullptr;
}

bool Engine::open(int peer, const Header& header, ConstBytes payload, bool more) {
  if (!at(peer).link) want(peer);
  if (!at(peer).link || at(peer).departed) return false;
  Link& link = *at(peer).link;
  if (over(at(peer))) hear_out(peer);  // who only sends would not learn it otherwise
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
