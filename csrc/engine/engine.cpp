#include "engine/engine.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>

#include "core/operation.h"
#include "engine/tasks.h"

namespace pycomm {
namespace {

// No sleep is longer, so that signals and deadlines are looked at.
constexpr std::chrono::milliseconds kSlice{100};
constexpr int kLooksPerClock = 32;

bool is_message(const Header& header) {
  return header.operation == static_cast<uint8_t>(Operation::send);
}

bool same_call(const Header& a, const Header& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.op == b.op &&
         a.algorithm == b.algorithm && a.peer == b.peer && a.count == b.count;
}

// -1, 0, 1: before, the same, after; both counters may wrap around.
int order(const Header& frame, uint16_t epoch, uint32_t sequence) {
  if (const auto d = static_cast<int16_t>(frame.epoch - epoch); d != 0) return d < 0 ? -1 : 1;
  const auto d = static_cast<int32_t>(frame.sequence - sequence);
  return d == 0 ? 0 : d < 0 ? -1 : 1;
}

// For as long as it lives pulse() may work with the links.
struct Rest {
  explicit Rest(std::mutex& turn) : mutex(turn) { mutex.unlock(); }
  Rest(const Rest&) = delete;
  Rest& operator=(const Rest&) = delete;
  ~Rest() { mutex.lock(); }
  std::mutex& mutex;
};

}  // namespace

Engine::Engine(std::vector<std::unique_ptr<Channel>> channels, EngineOptions options)
    : options_(std::move(options)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  peers_.resize(channels.size());
  for (size_t i = 0; i < channels.size(); ++i)
    if (channels[i]) peers_[i].link = std::make_unique<Link>(std::move(channels[i]));
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
  Header header = job.signature;
  header.epoch = epoch_;
  header.sequence = sequence_;
  Run task(*this, job, header);
  running_ = &header;
  guard(task, header, deadline);
  ++sequence_;
}

void Engine::send(int to, const Header& signature, ConstBytes bytes, const Deadline& deadline) {
  SendMessage task(*this, to, signature, bytes);
  guard(task, signature, deadline);
}

void Engine::receive(int from, const Header& signature, Bytes into, const Deadline& deadline) {
  awaited_ = {from, signature, into};
  ReceiveMessage task(*this, from, signature.peer);
  guard(task, signature, deadline);
  const Message& message = task.message();
  if (!same_call(message.header, signature))
    throw Mismatch(name(from) + " sent " + describe(message.header) + ", but " +
                       name(options_.rank) + " receives " + describe(signature) +
                       "; the message is dropped",
                   {.op = "recv", .rank = options_.rank, .peer = from});
  if (!message.kept.empty()) std::memcpy(into.data(), message.kept.data(), into.size());
}

// Runs the task; whatever breaks it, other than a disagreement, breaks the engine.
void Engine::guard(Task& task, const Header& signature, const Deadline& deadline) {
  const std::lock_guard turn(turn_);
  last_ = signature;
  last_.sequence = sequence_;
  last_.whereabouts = Whereabouts::inside;
  struct Clear {
    Engine& engine;
    ~Clear() {
      engine.last_.whereabouts = Whereabouts::between;
      engine.running_ = nullptr;
      engine.keep_half_arrived();
      engine.awaited_.reset();
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
    std::string text = fields.op + ": " + error.what();
    if (error.kind() == ErrorKind::timeout && running_ != nullptr) {
      const auto missing = call_roll(error);
      for (const int peer : missing)
        text += (peer == missing[0] ? "; missing from this call: " : ", ") + name(peer) +
                known_of(at(peer));
      if (!missing.empty()) fields.peer = missing[0];
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
  int looks = 0;
  Clock::time_point idle_since{};
  while (!task.done()) {
    if (task.advance()) {
      idle_since = {};
      if (++looks % 1024 == 0) check_world(task, deadline);
      continue;
    }
    // Look again for a while: a peer that is about to answer does so sooner than a sleeper wakes.
    if (options_.spin.count() > 0) {
      __builtin_ia32_pause();
      if (++looks % kLooksPerClock != 0) continue;
      const auto now = Clock::now();
      if (idle_since == Clock::time_point{}) idle_since = now;
      if (now - idle_since < options_.spin) continue;
    }
    sleep(task, deadline);
    idle_since = {};
  }
}

// Arms, looks once more, and only then sleeps: so no wake-up is lost.
void Engine::sleep(Task& task, const Deadline& deadline) {
  polled_.assign(1, {wake_.get(), POLLIN, 0});
  armed_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    if (!peer.link || peer.link->channel().hung_up()) continue;
    armed_.push_back(&peer.link->channel());
    polled_.push_back(
        armed_.back()->arm({!must_wait(static_cast<int>(i), task), !peer.link->idle()}));
  }
  struct Disarm {
    Engine& engine;
    ~Disarm() {
      for (size_t i = 0; i < engine.armed_.size(); ++i)
        engine.armed_[i]->disarm(engine.polled_[i + 1].revents);
    }
  };
  int woken = 1;
  {
    const Disarm disarm{*this};
    if (task.advance() || tend_all()) return;
    auto limit = std::min<std::chrono::nanoseconds>(kSlice, deadline.left());
    if (options_.heartbeat.count() > 0) limit = std::min(limit, pulse_interval());
    woken = ::poll(polled_.data(), polled_.size(),
                   static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
  }
  if (woken <= 0) asked_ = {};  // a signal, or nothing happened for long
  (void)tend_all();
  if (task.done() || task.advance()) return;
  check_needed(task);
  check_world(task, deadline);
  check_silence(task);
}

void Engine::check_world(const Task& task, const Deadline& deadline) {
  if (stopped_.load()) {
    const std::lock_guard lock(mutex_);
    throw GroupBroken("the group was aborted: " + stop_reason_);
  }
  const auto now = Clock::now();
  say_alive(now);
  if (options_.interrupted && now - asked_ >= kSlice) {
    asked_ = now;  // it may take a lock that others hold for long: not at every wake-up
    const Rest rest{turn_};
    if (options_.interrupted()) throw GroupBroken(name(options_.rank) + " was interrupted");
  }
  if (!deadline.expired()) return;
  const int from = task.receiving_from(), to = task.sending_to();
  const int peer = from != kNobody ? from : to;
  std::string text = "Timed out after " + std::to_string(deadline.limit_s()) + " s";
  if (peer != kNobody)
    text += (from != kNobody ? ", waiting for data from " : ", waiting to send to ") + name(peer);
  throw Timeout(text, {.peer = peer});
}

// Somebody who has left in peace matters only to those who still need something from it.
void Engine::check_needed(const Task& task) {
  for (const int peer : {task.receiving_from(), task.sending_to()})
    if (peer != kNobody && at(peer).departed)
      throw PeerLost(name(peer) + " has left the group: " + *at(peer).departed, {.peer = peer});
}

bool Engine::tend_all() {
  bool moved = false;
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
  Link& link = *who.link;
  for (;;) {
    const bool last =
        link.channel().hung_up();  // looked at first: what it sent before is there now
    const Header* header = this->front(peer);
    const Front front = header == nullptr ? Front::nothing : judge(peer, *header);
    who.front = front;
    const bool waits = header == nullptr || link.payload_left() > 0;
    if (front == Front::later || (front == Front::ours && !waits)) return front;
    if (!waits) continue;
    if (last && !who.departed && (header == nullptr || link.peek().size() < link.payload_left()))
      throw PeerLost(name(peer) + " died or lost its connection: it hung up without a word",
                     {.peer = peer});
    return front;
  }
}

// What the frame at the front means here. Front::nothing: it was dealt with, as far as it has
// arrived.
Engine::Front Engine::judge(int peer, const Header& header) {
  Link& link = *at(peer).link;
  switch (header.kind) {
    case FrameKind::data:
      at(peer).last = header;
      break;
    case FrameKind::pulse:
      check(header.bytes == 0, "a pulse has a payload");
      at(peer).last = header;
      link.finish();
      return Front::nothing;
    case FrameKind::mismatch:
      // Of a call that we have yet to make, or of an epoch that we have yet to hear of; and a
      // message that we send is not cut by one of the past. What we know already must not stay in
      // the way.
      if (const int when = order(header, epoch_, sequence_);
          when > 0 || (running_ == nullptr && header.epoch == epoch_ && (when == 0 || !awaited_)))
        return Front::later;
      [[fallthrough]];
    case FrameKind::goodbye:
      read_notice(peer, header);
      return Front::nothing;
  }
  if (is_message(header)) {
    absorb(peer, header);
    return Front::nothing;
  }
  const int when = order(header, epoch_, sequence_);
  if (when < 0) {  // of a call that failed
    link.discard();
    (void)link.front();
    return Front::nothing;
  }
  if (when > 0 || running_ == nullptr) return Front::later;
  if (!same_call(header, *running_)) disagree(peer, header);
  return Front::ours;
}

Link* Engine::incoming(int peer) {
  return tend(peer) == Front::ours ? at(peer).link.get() : nullptr;
}

bool Engine::open(int peer, const Header& header, ConstBytes payload) {
  Link& link = *at(peer).link;
  if (at(peer).departed) return false;
  if (!link.idle() && !link.flush()) return false;
  link.begin(header, payload);
  return true;
}

size_t Engine::push(int peer) {
  const size_t n = at(peer).link->push();
  payload_sent_ += n;
  return n;
}

// A message that nobody waits for is kept until somebody does, so that a sender is never stuck on a
// peer that is busy with something else.
void Engine::absorb(int peer, const Header& header) {
  Peer& who = at(peer);
  Link& link = *who.link;
  if (who.messages.empty() || who.messages.back().have == who.messages.back().bytes) {
    check(header.dtype < kDtypes.size(), "a message has no sound header");
    const size_t bytes = header.count * bytes_of(static_cast<Dtype>(header.dtype));
    check(bytes >= header.bytes, "a message has no sound header");
    Message message{.header = header, .bytes = bytes};
    const bool queued = std::ranges::any_of(
        who.messages, [&](const Message& m) { return m.header.peer == header.peer; });
    if (awaited_ && awaited_->from == peer && !queued && same_call(header, awaited_->signature)) {
      message.into = awaited_->into.data();
    } else {
      message.kept.resize(bytes);
      message.into = message.kept.data();
    }
    if (bytes == 0) {  // whole already: mark it so that an empty message counts
      link.finish();
      who.messages.push_back(std::move(message));
      return;
    }
    who.messages.push_back(std::move(message));
  }
  Message& message = who.messages.back();
  while (link.payload_left() > 0) {
    check(message.have + link.payload_left() <= message.bytes, "a message is longer than it says");
    const size_t n = link.receive({message.into + message.have, link.payload_left()});
    if (n == 0) return;
    message.have += n;
  }
  link.finish();
}

// A receive ends before its message has: the rest must not land in an array that may be gone.
void Engine::keep_half_arrived() {
  if (!awaited_) return;
  auto& messages = at(awaited_->from).messages;
  if (messages.empty() || messages.back().have == messages.back().bytes) return;
  Message& message = messages.back();
  if (message.into != awaited_->into.data()) return;
  message.kept.resize(message.bytes);
  std::memcpy(message.kept.data(), message.into, message.have);
  message.into = message.kept.data();
}

std::optional<Message> Engine::take_message(int peer, uint32_t tag) {
  auto& messages = at(peer).messages;
  const auto found =
      std::ranges::find_if(messages, [&](const Message& m) { return m.header.peer == tag; });
  if (found == messages.end() || found->have < found->bytes) return std::nullopt;
  Message message = std::move(*found);
  messages.erase(found);
  return message;
}

}  // namespace pycomm
