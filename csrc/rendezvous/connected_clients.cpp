// See connected_clients.h.
#include "rendezvous/connected_clients.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>

#include "core/errors.h"
#include "os/socket.h"

namespace pycomm::rendezvous {
namespace {

constexpr size_t kReadBytes = 1 << 16;

// Connections accepted per round, before other sockets have their turn.
constexpr int kAcceptsPerRound = 16;
// Pause of accepting when no descriptor is left and no pending connection can be evicted.
constexpr std::chrono::milliseconds kAcceptPause{100};

bool is_pending(const ClientConnection& client) { return client.is_pending(); }

}  // namespace

using store_frame::kMaxStoreBytes;
using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

RequestHandler::RequestHandler(std::string hello, const os::WakeEvent& changed)
    : hello_(std::move(hello)), changed_(changed) {}

std::optional<Reply> RequestHandler::handle(const Request& request) {
  if (request.verb == Verb::hello) return Reply{Status::ok, hello_};
  if (request.verb == Verb::get) {
    auto value = keys_.find(request.key);
    if (!value) return std::nullopt;
    return Reply{Status::ok, std::move(*value)};
  }
  Reply reply = change_once(request);
  changed_.notify();
  return reply;
}

// Applies a change, or returns the kept reply if the change was already applied.
Reply RequestHandler::change_once(const Request& request) {
  if (request.number == 0) return change(request);
  ClientReplies& kept = replies_[request.client];
  kept.oldest = std::max(kept.oldest, request.oldest);
  kept.replies.erase(kept.replies.begin(), kept.replies.lower_bound(kept.oldest));
  if (request.number < kept.oldest)
    return {Status::refused, "outdated request: its client no longer waits for it"};
  const auto found = kept.replies.find(request.number);
  if (found != kept.replies.end()) return found->second;
  return kept.replies.emplace(request.number, change(request)).first->second;
}

// Applies a set, add, remove or claim.
Reply RequestHandler::change(const Request& request) {
  if (request.verb == Verb::set) {
    const bool fits = keys_.set_within(request.key, request.value, kMaxStoreBytes);
    return {fits ? Status::ok : Status::full, ""};
  }
  if (request.verb == Verb::remove) {
    auto value = keys_.remove(request.key);
    if (!value) return {Status::absent, ""};
    return {Status::ok, std::move(*value)};
  }
  if (request.verb == Verb::claim) {
    auto value = keys_.claim_within(request.key, request.value, kMaxStoreBytes);
    if (!value) return {Status::full, ""};
    return {Status::ok, std::move(*value)};
  }
  return add(request);
}

Reply RequestHandler::add(const Request& request) {
  int64_t amount = 0;
  const char* end = request.value.data() + request.value.size();
  const auto parsed = std::from_chars(request.value.data(), end, amount);
  if (parsed.ec != std::errc{} || parsed.ptr != end)
    return {Status::refused, "invalid amount of an add: not a 64-bit integer"};
  try {
    const auto sum = keys_.add_within(request.key, amount, kMaxStoreBytes);
    if (!sum) return {Status::full, ""};
    return {Status::ok, std::to_string(*sum)};
  } catch (const InvalidArgument& error) {  // the client raises it
    return {Status::refused, error.what()};
  }
}

pollfd ClientConnection::awaited() const {
  const int fd = handshake_ ? handshake_->fd() : socket_.get();
  const bool sends = handshake_ ? handshake_sends_ : !out_.empty();
  return {fd, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
}

Clock::time_point ClientConnection::deadline() const {
  if (handshake_) return Clock::now() + handshake_->deadline().left();
  return waiting_ ? wait_end_ : Clock::time_point::max();
}

bool ClientConnection::advance(short events, RequestHandler& handler) {
  if (handshake_) return advance_handshake(events);
  if (!out_.empty()) return events == 0 || send();
  if (waiting_) return events == 0 && answer(handler);  // a waiting client must not send
  return events == 0 || receive(handler);
}

bool ClientConnection::advance_handshake(short events) {
  if (events == 0 && !handshake_->deadline().expired()) return true;
  switch (handshake_->advance()) {
    case transport::Handshake::Step::want_read:
      handshake_sends_ = false;
      return true;
    case transport::Handshake::Step::want_write:
      handshake_sends_ = true;
      return true;
    case transport::Handshake::Step::refused:
      return false;
    case transport::Handshake::Step::done:
      break;
  }
  socket_ = handshake_->release();
  handshake_.reset();
  return true;
}

// Never reads past the end of the current request, so that at most one is in memory.
bool ClientConnection::receive(RequestHandler& handler) {
  auto parsed = store_frame::parse_request(in_);
  const size_t had = in_.size();
  in_.resize(had + std::min(kReadBytes, parsed.needed - had));
  const ssize_t got = ::recv(socket_.get(), in_.data() + had, in_.size() - had, 0);
  const int error = errno;
  in_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got <= 0) return got < 0 && (error == EAGAIN || error == EINTR);
  parsed = store_frame::parse_request(in_);
  if (parsed.parse != store_frame::Parse::complete) return parsed.parse == store_frame::Parse::more;
  in_.clear();
  wait_end_ = Clock::now() + std::min<std::chrono::milliseconds>(
                                 std::chrono::milliseconds(parsed.frame.wait_ms), kLongestWait);
  waiting_ = std::move(parsed.frame);
  return answer(handler);
}

bool ClientConnection::answer(RequestHandler& handler) {
  auto reply = handler.handle(*waiting_);
  if (!reply) {
    if (Clock::now() < wait_end_) return true;
    reply = {store_frame::Status::absent, ""};
  }
  waiting_.reset();
  out_ = store_frame::encode(*reply);
  sent_ = 0;
  return send();
}

bool ClientConnection::send() {
  while (sent_ < out_.size()) {
    const ssize_t got =
        ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0 && errno != EINTR) return false;
    if (got > 0) sent_ += static_cast<size_t>(got);
  }
  out_.clear();
  return true;
}

ConnectedClients::ConnectedClients(RequestHandler& handler, std::string key,
                                   std::chrono::nanoseconds handshake_limit)
    : handler_(handler), key_(std::move(key)), handshake_limit_(handshake_limit) {
  if (key_.empty()) throw InvalidArgument("the key of a store is empty");
}

void ConnectedClients::accept_from(const os::Fd& listener) {
  auto pending = static_cast<size_t>(std::ranges::count_if(clients_, is_pending));
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    bool exhausted = false;
    os::Fd fd = os::accept_from(listener.get(), &exhausted);
    if (exhausted && !evict()) accept_again_ = Clock::now() + kAcceptPause;
    if (!fd) return;
    os::keep_alive(fd.get());
    if (admission_.is_full(pending) && evict()) --pending;
    const uint64_t source = transport::source_of(fd.get());
    clients_.emplace_back(
        transport::Handshake(std::move(fd), transport::Handshake::Role::listener, key_,
                             {std::string(store_frame::kContext), store_frame::kServerRank,
                              store_frame::kClientRank},
                             handshake_limit_),
        source);
    ++pending;
    // Reads the greeting if it has arrived: evict() prefers connections without one.
    if (clients_.back().advance(POLLIN, handler_)) continue;
    clients_.pop_back();
    --pending;
  }
}

void ConnectedClients::append_awaited(std::vector<pollfd>& polled) const {
  for (const ClientConnection& client : clients_) polled.push_back(client.awaited());
}

Clock::time_point ConnectedClients::next_deadline() const {
  const auto now = Clock::now();
  auto next = now + ClientConnection::kLongestWait;
  if (accept_again_ > now) next = accept_again_;
  for (const ClientConnection& client : clients_) next = std::min(next, client.deadline());
  return next;
}

void ConnectedClients::advance(std::span<const pollfd> polled) {
  size_t at = 0;
  for (auto client = clients_.begin(); client != clients_.end(); ++at)
    client =
        client->advance(polled[at].revents, handler_) ? std::next(client) : clients_.erase(client);
}

void ConnectedClients::drop_pending() { std::erase_if(clients_, is_pending); }

}  // namespace pycomm::rendezvous
