#include "group/lobby.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"

namespace pycomm {
namespace {

// Connections that are accepted before the others get a turn: proofs that have come are looked at.
constexpr int kAcceptsInARound = 64;
constexpr std::chrono::milliseconds kSlice{100}, kRetry{50};

}  // namespace

Lobby::Lobby(Request request) : request_(std::move(request)), met_(request_.contacts.size()) {}

void Lobby::call(int peer, bool loses) {
  if (!met_[static_cast<size_t>(peer)]) callers_.try_emplace(peer, Caller{.loses = loses});
}

std::vector<ConnectResult> Lobby::round(std::chrono::nanoseconds limit, std::vector<pollfd>& also) {
  dial();
  wait(arrivals_.empty() ? limit : std::chrono::nanoseconds{0}, also);
  accept();
  advance_callers();
  advance_strangers();
  exchange();
  for (const ConnectResult& arrival : arrivals_) callers_.erase(arrival.peer);
  return std::exchange(arrivals_, {});
}

std::string Lobby::failure(int peer) const {
  const Caller& caller = callers_.at(peer);
  return " at " + contact(peer).ways[caller.way] +
         (caller.why.empty() ? "" : " (last failure: " + caller.why + ")");
}

// `peer` is whom we call, or -1: whoever it is has called us.
Handshake Lobby::shake(Fd fd, int peer, SocketTransport* by) {
  HandshakeParams params{.context = request_.context, .rank = request_.rank, .expected = peer};
  params.agreed = request_.agreed;
  params.patient = true;  // the other end may have said yes when our limit passes
  if (peer != -1)
    return {std::move(fd), Handshake::Role::connector, request_.key, std::move(params)};
  params.wanted = [this, by](int caller) { return wants(caller, by); };
  return {std::move(fd), Handshake::Role::listener, request_.key, std::move(params)};
}

bool Lobby::wants(int peer, const SocketTransport* by) const {
  const auto i = static_cast<size_t>(peer);
  if (peer < 0 || i >= met_.size() || met_[i] || request_.contacts[i].transport != by) return false;
  const auto caller = callers_.find(peer);
  // A call of ours that is not connected has said nothing, so the peer cannot have said yes to it.
  return peer < request_.rank || caller == callers_.end() || !caller->second.handshake ||
         !caller->second.handshake->connected();
}

void Lobby::dial() {
  for (auto& [peer, caller] : callers_) {
    if (caller.handshake || met_[static_cast<size_t>(peer)] || Clock::now() < caller.retry_at)
      continue;
    const Contact& to = contact(peer);
    try {
      caller.step = Handshake::Step::want_write;
      caller.handshake = std::make_unique<Handshake>(
          shake(to.transport->call(to.ways[caller.way]), peer, to.transport));
    } catch (const Forbidden& error) {
      // Another address may be allowed.
      caller.forbidden = request_.forbidden_is_final && to.ways.size() == 1;
      ++caller.refused;
      failed(peer, caller, error.what());
    } catch (const Error& error) {
      ++caller.refused;
      failed(peer, caller, error.what());
    }
  }
}

void Lobby::failed(int peer, Caller& caller, const std::string& why) {
  const Contact& to = contact(peer);
  caller.why = to.ways[caller.way] + ": " + why;
  caller.way = (caller.way + 1) % to.ways.size();
  caller.handshake.reset();
  caller.retry_at = Clock::now() + kRetry;
  ++caller.failures;
  if (request_.log)
    request_.log("connect to " + to.name + " failed " + std::to_string(caller.failures) +
                 " times with reason: " + caller.why + "; retry after 0.05 seconds");
  const bool hopeless = caller.forbidden || caller.refused >= request_.refusals ||
                        caller.failures >= request_.failures;
  if (hopeless && caller.loses) {
    met_[static_cast<size_t>(peer)] = true;  // never again
    const std::string_view hint = to.transport->name() == "shm"
                                      ? "; where the system lets no Unix socket connect these "
                                        "processes, set PYCOMM_TRANSPORT=tcp on every rank"
                                      : "";
    arrivals_.push_back(
        {.peer = peer, .why = caller.why + std::string(hint), .forbidden = caller.forbidden});
  }
}

void Lobby::wait(std::chrono::nanoseconds limit, std::vector<pollfd>& also) {
  std::vector<pollfd> polled = also;
  if (crowded_) limit = std::min<std::chrono::nanoseconds>(limit, kSlice);
  for (const auto& transport : request_.transports) {
    if (crowded_) break;
    for (const int listener : transport->listeners()) polled.push_back({listener, POLLIN, 0});
  }
  crowded_ = false;
  const auto add = [&](const Handshake& handshake, Handshake::Step step) {
    const bool write = step == Handshake::Step::want_write;
    polled.push_back({handshake.fd(), static_cast<short>(write ? POLLOUT : POLLIN), 0});
  };
  for (const auto& [peer, caller] : callers_) {
    if (caller.handshake) add(*caller.handshake, caller.step);
    if (!caller.handshake) limit = std::min<std::chrono::nanoseconds>(limit, kRetry);
  }
  for (const Stranger& stranger : strangers_) add(stranger.handshake, stranger.step);
  if (!strangers_.empty() || !callers_.empty())  // handshakes have limits of their own
    limit = std::min<std::chrono::nanoseconds>(limit, kSlice);
  for (const Waiting& waiting : waiting_) polled.push_back({waiting.fd.get(), POLLIN, 0});
  ::poll(polled.data(), polled.size(),
         static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
  std::copy_n(polled.begin(), also.size(), also.begin());
}

void Lobby::accept() {
  for (const auto& transport : request_.transports) {
    for (const int listener : transport->listeners()) {
      if (crowded_) break;
      for (int i = 0; i < kAcceptsInARound; ++i) {
        Fd fd = accept_from(listener, &crowded_);
        if (!fd) break;
        if (strangers_.size() >= max_strangers_) evict();
        const uint64_t source = source_of(fd.get());
        strangers_.push_back({transport.get(), shake(std::move(fd), -1, transport.get()), source});
        if (!advance(strangers_.back())) strangers_.pop_back();  // its greeting may be there
      }
    }
  }
  // No descriptors left: those that we hold may be why.
  for (size_t i = crowded_ ? (strangers_.size() + 3) / 4 : 0; i > 0; --i) evict();
}

void Lobby::evict() {
  std::vector<Pending> pending;
  for (const Stranger& one : strangers_) pending.push_back({one.source, one.handshake.greeted()});
  strangers_.erase(
      std::next(strangers_.begin(), static_cast<long>(choose_evicted(pending, random_))));
}

void Lobby::advance_callers() {
  for (auto& [peer, caller] : callers_) {
    if (!caller.handshake) continue;
    switch (caller.step = caller.handshake->advance()) {
      case Handshake::Step::done:
        meet(peer, *std::exchange(caller.handshake, nullptr), true);
        break;
      case Handshake::Step::refused:
        if (caller.handshake->declined()) {  // its own call is on its way
          caller.handshake.reset();
          caller.retry_at = Clock::now() + kRetry;
          break;
        }
        if (caller.handshake->differs()) {
          reject(peer, contact(peer).ways[caller.way] + ": " + caller.handshake->why());
          break;
        }
        if (caller.handshake
                ->was_disconnected()) {  // evicted, by what we can know: the caller has a limit
          caller.why = contact(peer).ways[caller.way] + ": " + caller.handshake->why();
          caller.handshake.reset();
          caller.retry_at = Clock::now() + kRetry;
          break;
        }
        if (!caller.handshake->connected()) ++caller.refused;
        failed(peer, caller, std::string(caller.handshake->why()));
        break;
      case Handshake::Step::want_read:
      case Handshake::Step::want_write:
        break;
    }
  }
}

void Lobby::advance_strangers() {
  for (auto at = strangers_.begin(); at != strangers_.end();)
    at = advance(*at) ? std::next(at) : strangers_.erase(at);
}

// False when its handshake is over.
bool Lobby::advance(Stranger& stranger) {
  stranger.step = stranger.handshake.advance();
  if (stranger.handshake.differs()) reject(stranger.handshake.peer(), stranger.handshake.why());
  if (stranger.step == Handshake::Step::done)
    meet(stranger.handshake.peer(), stranger.handshake, false);
  return stranger.step != Handshake::Step::done && stranger.step != Handshake::Step::refused;
}

// A rank of the group that was given another description of it: a further call ends alike.
void Lobby::reject(int peer, const std::string& why) {
  const auto i = static_cast<size_t>(peer);
  if (peer < 0 || i >= met_.size() || met_[i]) return;
  met_[i] = true;
  arrivals_.push_back({.peer = peer, .channel = {}, .why = why, .differs = true});
}

// Both ends have agreed on this connection; a call of our own is over. `called`: by us.
void Lobby::meet(int peer, Handshake& handshake, bool called) {
  Session session{.secret = handshake.session_secret(), .connector = called};
  Fd fd = handshake.release();
  met_[static_cast<size_t>(peer)] = true;
  if (const auto caller = callers_.find(peer); caller != callers_.end())
    caller->second.handshake.reset();
  try {
    contact(peer).transport->send_memory(fd.get());
    waiting_.push_back({peer, std::move(fd), std::move(session)});
  } catch (const Error& error) {
    arrivals_.push_back({.peer = peer, .why = error.what()});
  }
}

void Lobby::exchange() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    SocketTransport& by = *contact(at->peer).transport;
    if (by.exchanges() && poll_one(at->fd.get(), POLLIN, std::chrono::nanoseconds{0}) == 0) {
      ++at;
      continue;
    }
    ConnectResult& arrival = arrivals_.emplace_back();
    arrival.peer = at->peer;
    try {
      arrival.channel = by.accept(std::move(at->fd), Deadline(std::chrono::nanoseconds{0}));
      if (contact(at->peer).encrypted)
        arrival.channel = make_encrypted(std::move(arrival.channel), at->session);
    } catch (const Error& error) {
      arrival.why = error.what();
    }
    at = waiting_.erase(at);
  }
}

}  // namespace pycomm
