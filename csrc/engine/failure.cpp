// How an engine fails: disagreements, goodbyes, and the first cause that it repeats.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/operation.h"
#include "engine/engine.h"

namespace pycomm {
namespace {

// What a peer does not take in this time is left to its channel: with the 100 ms after which a wait
// hears a signal it is what Ctrl-C may take.
constexpr std::chrono::milliseconds kGoodbyeTimeout{100};
// For what has arrived and was not looked at when the engine breaks.
constexpr std::chrono::milliseconds kFinalPollTimeout{10};
// Much longer than a rank that waits in a call needs to answer, on a busy machine too; with
// kGoodbyeTimeout within the second that a call may exceed its limit by.
constexpr std::chrono::milliseconds kLivenessTimeout{400};

// A goodbye that blames no rank: the sender left cleanly.
constexpr uint8_t kLeftCleanly = 255;

// The payload of a goodbye: kind, who is to blame, and a sentence.
std::string encode_goodbye(uint8_t kind, int32_t peer, const std::string& text) {
  std::string payload(1 + sizeof peer, '\0');
  payload[0] = static_cast<char>(kind);
  std::memcpy(payload.data() + 1, &peer, sizeof peer);
  return payload + text;
}

// Whether data flows from the root only: a rank can be through with it before it heard of others.
bool is_one_way(const Header& header) {
  return (header.algorithm & kOnDevice) == 0 &&
         (header.operation == static_cast<uint8_t>(Operation::broadcast) ||
          header.operation == static_cast<uint8_t>(Operation::scatter));
}

}  // namespace

std::string describe(const Header& header) {
  const auto named = [](const auto& table, uint8_t i) {
    return i < table.size() ? std::string(table[i]) : "unknown " + std::to_string(i);
  };
  std::string text = named(kOperations, header.operation) + "(";
  if (header.operation == static_cast<uint8_t>(Operation::barrier)) return text + ")";
  text += header.dtype < kDtypes.size() ? std::string(kDtypes[header.dtype].name) : "unknown dtype";
  const std::string count = std::to_string(header.count), peer = std::to_string(header.peer);
  switch (static_cast<Operation>(header.operation)) {
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      text += ", count " + count + ", " + named(kReduceOps, header.op);
      break;
    case Operation::reduce:
      text += ", count " + count + ", " + named(kReduceOps, header.op) + ", root " + peer;
      break;
    case Operation::broadcast:
    case Operation::gather:
    case Operation::scatter:
      text += ", count " + count + ", root " + peer;
      break;
    case Operation::send:
    case Operation::recv:
      text += ", count " + count + ", tag " + peer;
      break;
    case Operation::all_gather:
      text += header.peer == 0 ? ", count " + count
                               : ", counts of a list with sum " + count + " and hash " + peer;
      break;
    case Operation::all_to_all:
      text +=
          header.peer == 1 ? ", counts by rank" : ", count " + count + " from the one to the other";
      break;
    case Operation::barrier:
      break;
  }
  const bool on_device = (header.algorithm & kOnDevice) != 0;
  return text + ", " + named(kAlgorithms, header.algorithm & static_cast<uint8_t>(~kOnDevice)) +
         (on_device ? ", on CUDA devices)" : ")");
}

// Tells all peers, then forgets the calls of this epoch. User memory is untouched by then: plans
// write to it only when every rank's header was seen.
void Engine::throw_mismatch(int peer, const Header& theirs) {
  const std::string text =
      "ranks disagree about call " + std::to_string(sequence_) + ": " + name(options_.rank) +
      " called " + describe(expected_from(peer)) + ", " + name(peer) + " called " +
      describe(theirs) +
      (is_one_way(theirs) || is_one_way(expected_from(peer)) ? "; what they write is undefined"
                                                             : "; no array was changed");
  abort_call(peer, sequence_, text);
}

// The peer has sent more for a call than this rank took, or less: one of them took it for another.
// That shows when the call is over on one side, which may have written its output by then.
void Engine::throw_mismatch_on_end(int peer, const Header& theirs) {
  const bool over = order(theirs, epoch_, sequence_) < 0;
  const uint32_t sequence = over ? theirs.sequence : sequence_;
  const std::string mine = over ? "has ended it without what " + name(peer) + " sent it for "
                                : "called " + describe(expected_from(peer)) + " and waits for " +
                                      name(peer) + ", which has gone on to ";
  abort_call(peer, sequence,
             "ranks disagree about call " + std::to_string(sequence) + ": " + name(options_.rank) +
                 " " + mine + describe(theirs) + "; what the call writes is undefined");
}

// A rank that missed a mismatch in a one-directional call detects it at the next receive from the
// mismatching peer.
void Engine::throw_mismatch_on_past(int peer) {
  abort_call(peer, before_.sequence,
             "ranks disagree about a call before " + describe(*running_) + ": " +
                 name(options_.rank) + " and " + name(peer) +
                 " have not made the same ones, here the last was " + describe(before_) +
                 "; what the call writes is undefined");
}

void Engine::abort_call(int peer, uint32_t sequence, const std::string& text) {
  const Header notice{.kind = FrameKind::mismatch, .epoch = epoch_, .sequence = sequence};
  const auto op = running_ ? name_of(static_cast<Operation>(running_->operation)) : "recv";
  const ErrorFields fields{
      .op = std::string(op), .sequence = sequence, .rank = options_.rank, .peer = peer};
  new_epoch(notice, text);
  throw Mismatch(text, fields);
}

// Every rank passes the notice on to every other before it forgets the old epoch. So a rank that
// waits for a rank which has aborted the call receives the notice on the very link that it reads.
void Engine::new_epoch(const Header& notice, const std::string& text) {
  ++epoch_;
  sequence_ = 0;
  past_ = 0;
  running_ = nullptr;
  last_mismatch_ = notice;
  last_mismatch_text_ = text;
  for (PeerState& state : peers_) {
    const auto peer_lost =
        std::erase_if(state.messages, [](const Message& m) { return is_agreement(m.header); });
    state.buffered_bytes -= peer_lost * sizeof(Message);
    if (!state.link) continue;
    state.link->abandon();  // what was half received is of an old epoch and is dropped
    state.link->post(notice, text);
  }
  flush_all(kGoodbyeTimeout);
}

void Engine::read_notice(int peer, const Header& header) {
  PeerState& state = at(peer);
  require_valid(peer, header.bytes <= kNoticeBytes, "a notice is too long");
  const ConstBytes here = state.link->peek();
  if (here.size() < header.bytes) return;  // not whole yet
  const std::string payload(reinterpret_cast<const char*>(here.data()), here.size());
  const Header notice = header;
  state.link->take(here.size());
  state.link->finish();
  if (notice.kind == FrameKind::goodbye) return handle_goodbye(peer, payload);
  if (notice.epoch != epoch_) return;  // we have noticed it ourselves
  const int64_t sequence = sequence_;
  const auto op = running_ ? name_of(static_cast<Operation>(running_->operation)) : "";
  new_epoch(notice, payload);
  throw Mismatch(
      payload, {.op = std::string(op), .sequence = sequence, .rank = options_.rank, .peer = peer});
}

void Engine::require_valid(int peer, bool sound, std::string_view what) const {
  if (!sound) throw protocol_violation(peer, what);
}

PeerLost Engine::protocol_violation(int peer, std::string_view what) const {
  return PeerLost(name(peer) + " sent what nobody can read: " + std::string(what), {.peer = peer});
}

void Engine::handle_goodbye(int peer, const std::string& payload) {
  require_valid(peer, payload.size() >= 1 + sizeof(int32_t), "a goodbye is too short");
  const auto kind = static_cast<uint8_t>(payload[0]);
  int32_t blamed = kNoRank;
  std::memcpy(&blamed, payload.data() + 1, sizeof blamed);
  const std::string text = payload.substr(1 + sizeof blamed);
  at(peer).left_reason = "has left the group: " + text;
  at(peer).left_cleanly = kind == kLeftCleanly;
  if (kind == kLeftCleanly) return;
  const std::string reported = text + " (as " + name(peer) + " reports)";
  if (kind == static_cast<uint8_t>(ErrorKind::timeout)) throw Timeout(reported, {.peer = blamed});
  if (blamed == options_.rank)
    throw PeerLost(name(peer) + " gave up on this rank: " + text, {.peer = peer});
  if (kind == static_cast<uint8_t>(ErrorKind::peer_lost))
    throw PeerLost(reported, {.peer = blamed});
  throw GroupBroken(reported, {.peer = blamed == kNoRank ? peer : blamed});
}

void Engine::throw_peer_error(int peer) {
  PeerState& state = at(peer);
  (void)poll_peer(peer);
  while (const Header* header = front(peer)) {
    if (header->kind != FrameKind::goodbye)
      state.link->discard();
    else if (read_notice(peer, *header); !state.left_reason)
      break;  // it never came whole
  }
  throw peer_lost(peer);
}

PeerLost Engine::peer_lost(int peer) const {
  const auto& link = peers_[static_cast<size_t>(peer)].link;
  const auto protocol_error = link ? link->channel().protocol_error() : std::string_view{};
  if (!protocol_error.empty()) return protocol_violation(peer, protocol_error);
  const PeerState& state = peers_[static_cast<size_t>(peer)];
  const std::string no_word = state.ended && link && !link->channel().is_closed()
                                  ? "died: its process ended without a word"
                                  : "died or lost its connection: it hung up without a word";
  return PeerLost(name(peer) + " " + state.left_reason.value_or(no_word), {.peer = peer});
}

// A rank that waits in a call answers a goodbye at once with one of its own, so that all ranks
// learn which did not answer. Returns those.
std::vector<int> Engine::find_unresponsive_peers(const Error& error) {
  post_goodbye(static_cast<uint8_t>(error.kind()), error.fields().peer, error.what());
  const Deadline deadline(kLivenessTimeout);
  for (;;) {
    std::vector<int> silent;
    std::vector<pollfd> waiting;
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (!peers_[i].link || answers(static_cast<int>(i), deadline)) continue;
      silent.push_back(static_cast<int>(i));
      waiting.push_back(peers_[i].link->channel().arm({true, false}));
      if (answers(static_cast<int>(i), deadline))
        waiting.back().fd = -1;  // it came between: do not sleep for it
    }
    if (silent.empty() || deadline.expired()) return silent;
    const bool idle = std::ranges::all_of(waiting, [](const pollfd& p) { return p.fd >= 0; });
    if (idle) ::poll(waiting.data(), waiting.size(), 10);
    for (size_t i = 0; i < silent.size(); ++i)
      at(silent[i]).link->channel().disarm(waiting[i].revents);
  }
}

// What it sends before its goodbye is thrown away, for as long as there is time.
bool Engine::answers(int peer, const Deadline& deadline) {
  PeerState& state = at(peer);
  try {
    while (const Header* header = front(peer)) {
      if (header->kind == FrameKind::goodbye) return true;
      if (deadline.expired()) break;
      state.link->discard();
    }
  } catch (const PeerLost&) {  // it violates the protocol: that is no silence
    return true;
  }
  return state.left_reason || over(state);
}

void Engine::post_goodbye(uint8_t kind, int peer, const std::string& text) {
  const Header header{.kind = FrameKind::goodbye, .epoch = epoch_};
  for (PeerState& state : peers_) {
    if (!state.link) continue;
    state.link->abandon();
    state.link->post(header, encode_goodbye(kind, peer, text));
  }
  flush_all(kGoodbyeTimeout);
}

void Engine::say_goodbye(uint8_t kind, int peer, const std::string& text) noexcept {
  try {
    if (options_.connector) options_.connector->close();
    (void)accept_connections();  // peers that have just connected receive it too
    post_goodbye(kind, peer, text);
  } catch (...) {  // out of memory: the closed connection must say it alone
  }
  for (PeerState& state : peers_)
    if (state.link) state.link->close();
}

// Sends what is unsent to all peers, for at most `limit`. Does not read: peers that wait for this
// rank do.
bool Engine::flush_all(std::chrono::nanoseconds limit) {
  const Deadline deadline(limit);
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Channel*> armed;
    for (PeerState& state : peers_) {
      if (!state.link || state.link->channel().is_closed() || state.link->flush()) continue;
      waiting.push_back(state.link->channel().arm({false, true}));
      armed.push_back(&state.link->channel());
      if (state.link->flush()) waiting.back().fd = -1;  // room came between: do not sleep for it
    }
    if (armed.empty()) return true;
    const bool idle = std::ranges::all_of(waiting, [](const pollfd& p) { return p.fd >= 0; });
    if (idle) ::poll(waiting.data(), waiting.size(), 10);
    for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(waiting[i].revents);
    if (deadline.expired()) return false;
  }
}

void Engine::leave() noexcept {
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) return;
    broken_ = "it was closed";
  }
  say_goodbye(kLeftCleanly, kNoRank, "it closed the group");
}

void Engine::fail(const Error& error) noexcept {
  const std::lock_guard turn(turn_);
  abort(error);
}

void Engine::abort(const Error& error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) return;
    broken_ = error.what();
    try {
      lost_ = find_lost(error);
    } catch (...) {  // out of memory: then no rank is known to be lost
    }
  }
  say_goodbye(static_cast<uint8_t>(error.kind()), error.fields().peer, error.what());
}

// The blamed rank, unless it has said itself why it aborted; ranks whose connection closed
// unexpectedly; and ranks that left cleanly.
std::vector<int> Engine::find_lost(const Error& error) {
  const int blamed = error.kind() == ErrorKind::peer_lost ? error.fields().peer : kNoRank;
  const Deadline deadline(kFinalPollTimeout);
  std::vector<int> found;
  for (size_t i = 0; i < peers_.size(); ++i) {
    PeerState& state = peers_[i];
    bool peer_lost = static_cast<int>(i) == blamed && (!state.left_reason || !state.link);
    // It may have left so lately that nothing of that was looked at.
    if (state.link && !state.left_reason && answers(static_cast<int>(i), deadline)) {
      const ConstBytes word = state.link->has_front() ? state.link->peek() : ConstBytes{};
      peer_lost |= word.empty() ? over(state) : static_cast<uint8_t>(word[0]) == kLeftCleanly;
    }
    if (peer_lost || state.left_cleanly) found.push_back(static_cast<int>(i));
  }
  return found;
}

std::string Engine::broken() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

std::vector<int> Engine::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Engine::stop(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_reason_ = reason;
  }
  stopped_.store(true);
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void Engine::check_usable() {
  const std::lock_guard lock(mutex_);
  if (!broken_.empty())
    throw GroupBroken("this group cannot be used any more: " + broken_, {.rank = options_.rank});
}

// Asks the kernel, for some channels learn it from their descriptor alone.
bool Engine::has_closed(int peer) {
  PeerState& state = at(peer);
  if (over(state)) return true;
  Channel& channel = state.link->channel();
  pollfd polled = channel.arm({});
  ::poll(&polled, 1, 0);
  channel.disarm(polled.revents);
  if (!state.left_reason && !state.process.ended() && state.process.look()) {
    state.last_byte_at = Clock::now();
    process_ended_ = true;
  }
  if (process_ended_) update_ended();
  return over(state);
}

// Whether behind the frame at its front, which the next call may request_connection, `peer` says
// that it is done.
bool Engine::closed_cleanly(int peer) {
  const auto goodbye = at(peer).link->behind_front(FrameKind::goodbye);
  return goodbye && !goodbye->empty() && static_cast<uint8_t>((*goodbye)[0]) == kLeftCleanly;
}

void Engine::check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited) {
  std::unique_lock turn(turn_, std::try_to_lock);
  const Deadline deadline(limit);
  while (!turn && !deadline.expired()) {
    std::this_thread::yield();
    (void)turn.try_lock();
  }
  check_usable();
  if (!turn || running_ != nullptr || !awaited_.empty()) return;
  try {
    poll_for_failures(awaited);
    while (!deadline.expired()) {
      wait_for_close(awaited);
      poll_for_failures(awaited);
    }
  } catch (const Error& error) {
    abort(error);
    throw;
  }
}

void Engine::poll_for_failures(const std::vector<int>& awaited) {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (!at(peer).link) continue;
    const bool last = std::ranges::count(awaited, peer) > 0 && has_closed(peer);
    const Header* header = front(peer);
    for (; header != nullptr && header->kind == FrameKind::heartbeat; header = front(peer))
      take_heartbeat(peer, *header);
    if (header != nullptr && header->kind == FrameKind::goodbye) read_notice(peer, *header);
    if (last && !at(peer).left_reason && (header == nullptr || !closed_cleanly(peer)))
      throw_peer_error(peer);
  }
}

// Until one of them closes its connection, as every rank that ends does, or for a moment.
void Engine::wait_for_close(const std::vector<int>& awaited) {
  std::vector<pollfd> polled;
  std::vector<Channel*> armed;
  for (const int peer : awaited) {
    if (!at(peer).link || at(peer).link->channel().is_closed()) continue;
    armed.push_back(&at(peer).link->channel());
    polled.push_back(armed.back()->arm({}));
  }
  ::poll(polled.data(), polled.size(), 10);
  for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(polled[i].revents);
}

}  // namespace pycomm
