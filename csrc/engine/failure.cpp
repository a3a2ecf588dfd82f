// Failures of an engine: mismatches, goodbye messages, and the first cause that it reports.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/operation.h"
#include "engine/engine.h"

namespace pycomm {
namespace {

// Bytes that a peer does not take within this time are left to its channel. A wait notices a signal
// within 100 ms; together these bound the time that Ctrl-C takes.
constexpr std::chrono::milliseconds kGoodbyeTimeout{100};
// Time to read frames that had arrived but were unread when the engine broke.
constexpr std::chrono::milliseconds kFinalPollTimeout{10};
// Much longer than a rank that waits in a call needs to answer, even on a busy machine. Together
// with kGoodbyeTimeout it is below 1 s, by which a call may exceed its timeout.
constexpr std::chrono::milliseconds kLivenessTimeout{400};

// A goodbye that blames no rank: the sender left cleanly.
constexpr uint8_t kLeftCleanly = 255;

// The payload of a goodbye message: kind, blamed rank, text.
std::string encode_goodbye(uint8_t kind, int32_t peer, const std::string& text) {
  std::string payload(1 + sizeof peer, '\0');
  payload[0] = static_cast<char>(kind);
  std::memcpy(payload.data() + 1, &peer, sizeof peer);
  return payload + text;
}

// Whether data flows only from the root: a rank can complete it before it received anything from
// the others.
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

// Notifies all peers, then drops the calls of this epoch. User memory is still unchanged: plans
// write to it only after the headers of all ranks were checked.
void Engine::throw_mismatch(int peer, const Header& theirs) {
  const std::string text =
      "ranks disagree about call " + std::to_string(sequence_) + ": " + name(options_.rank) +
      " called " + describe(expected_from(peer)) + ", " + name(peer) + " called " +
      describe(theirs) +
      (is_one_way(theirs) || is_one_way(expected_from(peer)) ? "; what they write is undefined"
                                                             : "; no array was changed");
  abort_call(peer, sequence_, text);
}

// The peer sent more or less data for a call than this rank expected: the two made different calls.
// It is detected after one side completed the call, which may have written its output.
void Engine::throw_mismatch_on_end(int peer, const Header& theirs) {
  const bool over = order(theirs, epoch_, sequence_) < 0;
  const uint32_t sequence = over ? theirs.sequence : sequence_;
  const std::string mine = over ? "completed it without the data that " + name(peer) + " sent for "
                                : "called " + describe(expected_from(peer)) + " and waits for " +
                                      name(peer) + ", which continued with ";
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
                 " made different calls; the last one here was " + describe(before_) +
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

// Every rank forwards the notice to all others before it drops the old epoch. A rank that waits for
// a peer which aborted the call therefore receives the notice on the link that it reads.
void Engine::new_epoch(const Header& notice, const std::string& text) {
  ++epoch_;
  sequence_ = 0;
  past_ = 0;
  running_ = nullptr;
  last_mismatch_ = notice;
  last_mismatch_text_ = text;
  for (PeerState& state : peers_) {
    const auto dropped =
        std::erase_if(state.messages, [](const Message& m) { return is_agreement(m.header); });
    state.buffered_bytes -= dropped * sizeof(Message);
    if (!state.link) continue;
    state.link->abandon();  // a partly received frame has an old epoch and is dropped
    state.link->post(notice, text);
  }
  flush_all(kGoodbyeTimeout);
}

void Engine::read_notice(int peer, const Header& header) {
  PeerState& state = at(peer);
  require_valid(peer, header.bytes <= kNoticeBytes, "a notice is too long");
  const ConstBytes here = state.link->peek();
  if (here.size() < header.bytes) return;  // not complete yet
  const std::string payload(reinterpret_cast<const char*>(here.data()), here.size());
  const Header notice = header;
  state.link->take(here.size());
  state.link->finish();
  if (notice.kind == FrameKind::goodbye) return handle_goodbye(peer, payload);
  if (notice.epoch != epoch_) return;  // this rank has detected the mismatch itself
  const int64_t sequence = sequence_;
  const auto op = running_ ? name_of(static_cast<Operation>(running_->operation)) : "";
  new_epoch(notice, payload);
  throw Mismatch(
      payload, {.op = std::string(op), .sequence = sequence, .rank = options_.rank, .peer = peer});
}

void Engine::require_valid(int peer, bool valid, std::string_view what) const {
  if (!valid) throw protocol_violation(peer, what);
}

PeerLost Engine::protocol_violation(int peer, std::string_view what) const {
  return PeerLost("protocol error from " + name(peer) + ": " + std::string(what), {.peer = peer});
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
    throw PeerLost(name(peer) + " considers this rank lost: " + text, {.peer = peer});
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
      break;  // it never arrived completely
  }
  throw peer_lost(peer);
}

PeerLost Engine::peer_lost(int peer) const {
  const auto& link = peers_[static_cast<size_t>(peer)].link;
  const auto protocol_error = link ? link->channel().protocol_error() : std::string_view{};
  if (!protocol_error.empty()) return protocol_violation(peer, protocol_error);
  const PeerState& state = peers_[static_cast<size_t>(peer)];
  const std::string unexpected =
      state.ended && link && !link->channel().is_closed()
          ? "died: its process ended without a goodbye message"
          : "died or lost its connection: the connection closed unexpectedly";
  return PeerLost(name(peer) + " " + state.left_reason.value_or(unexpected), {.peer = peer});
}

// A liveness check: a rank that waits in a call answers a goodbye message at once with its own.
// Returns the peers that did not answer.
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
        waiting.back().fd = -1;  // it answered in the meantime: do not sleep
    }
    if (silent.empty() || deadline.expired()) return silent;
    const bool idle = std::ranges::all_of(waiting, [](const pollfd& p) { return p.fd >= 0; });
    if (idle) ::poll(waiting.data(), waiting.size(), 10);
    for (size_t i = 0; i < silent.size(); ++i)
      at(silent[i]).link->channel().disarm(waiting[i].revents);
  }
}

// Discards what the peer sent before its goodbye, until the deadline.
bool Engine::answers(int peer, const Deadline& deadline) {
  PeerState& state = at(peer);
  try {
    while (const Header* header = front(peer)) {
      if (header->kind == FrameKind::goodbye) return true;
      if (deadline.expired()) break;
      state.link->discard();
    }
  } catch (const PeerLost&) {  // a protocol error is an answer, too
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
  } catch (...) {  // out of memory: the peers see only the closed connection
  }
  for (PeerState& state : peers_)
    if (state.link) state.link->close();
}

// Sends the unsent bytes of all links, for at most `limit`. Does not read, because peers that wait
// for this rank read.
bool Engine::flush_all(std::chrono::nanoseconds limit) {
  const Deadline deadline(limit);
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Channel*> armed;
    for (PeerState& state : peers_) {
      if (!state.link || state.link->channel().is_closed() || state.link->flush()) continue;
      waiting.push_back(state.link->channel().arm({false, true}));
      armed.push_back(&state.link->channel());
      if (state.link->flush()) waiting.back().fd = -1;  // sent in the meantime: do not sleep
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
    } catch (...) {  // out of memory: no rank is reported as lost
    }
  }
  say_goodbye(static_cast<uint8_t>(error.kind()), error.fields().peer, error.what());
}

// The blamed rank, unless it sent the reason of its own abort; ranks whose connection closed
// unexpectedly; and ranks that left cleanly.
std::vector<int> Engine::find_lost(const Error& error) {
  const int blamed = error.kind() == ErrorKind::peer_lost ? error.fields().peer : kNoRank;
  const Deadline deadline(kFinalPollTimeout);
  std::vector<int> found;
  for (size_t i = 0; i < peers_.size(); ++i) {
    PeerState& state = peers_[i];
    bool is_lost = static_cast<int>(i) == blamed && (!state.left_reason || !state.link);
    // Its goodbye may have arrived without having been read.
    if (state.link && !state.left_reason && answers(static_cast<int>(i), deadline)) {
      const ConstBytes goodbye = state.link->has_front() ? state.link->peek() : ConstBytes{};
      is_lost |= goodbye.empty() ? over(state) : static_cast<uint8_t>(goodbye[0]) == kLeftCleanly;
    }
    if (is_lost || state.left_cleanly) found.push_back(static_cast<int>(i));
  }
  return found;
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

// Polls the descriptor, because some channels detect a closed connection only by it.
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

// Whether a clean goodbye of `peer` follows the frame at the front, which the next call may read.
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

// Waits until one of them closes its connection, as every rank does at its end, or for 10 ms.
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
