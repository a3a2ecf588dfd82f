// See store_server.h.
#include "rendezvous/store_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "os/random.h"
#include "os/thread.h"

namespace pycomm::rendezvous {

using store_frame::Parse;
using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

namespace {

// Connections accepted per round, before other sockets have their turn.
constexpr int kAcceptsPerRound = 16;
// Pause of accepting when no descriptor is left and no pending connection can be evicted.
constexpr std::chrono::milliseconds kAcceptPause{100};
constexpr size_t kReadBytes = 1 << 16;
// Upper limit of a wait, so that nothing overflows.
constexpr std::chrono::hours kLongest{1};

std::string random_name() {
  std::string name;
  for (const uint8_t byte : os::random_bytes()) name += static_cast<char>('a' + byte % 16);
  return name;
}

}  // namespace

struct StoreServer::Client {
  Client(transport::Handshake first, uint64_t from)
      : source(from), handshake(std::make_unique<transport::Handshake>(std::move(first))) {}
  int fd() const { return handshake ? handshake->fd() : socket.get(); }

  uint64_t source;                                  // source_of() the connection
  std::unique_ptr<transport::Handshake> handshake;  // null after it completed
  bool handshake_sends = false;
  os::Fd socket;                                // after the handshake
  std::string in, out;                          // a partial request, a reply
  size_t sent = 0;                              // bytes of the reply
  std::optional<store_frame::Request> waiting;  // a get whose key is not set yet
  Clock::time_point wait_end{};
};

StoreServer::StoreServer(const os::Address& address, std::string key,
                         std::chrono::nanoseconds handshake_limit)
    : key_(std::move(key)),
      handshake_limit_(handshake_limit),
      listener_(os::listen_on(address)),
      reconnect_listener_(os::listen_on(address.with_port(0))),
      port_(os::local_address(listener_.get()).port()),
      hello_(random_name() + " " +
             std::to_string(os::local_address(reconnect_listener_.get()).port())),
      born_(::getpid()) {
  if (key_.empty()) throw InvalidArgument("the key of a store is empty");
  thread_ = os::start_thread("pycomm-store", [this] { run(); });
}

StoreServer::~StoreServer() {
  if (::getpid() != born_) {  // a forked child: thread and listeners belong to the parent
    thread_.detach();
    return;
  }
  stopping_ = true;
  wake_.notify();
  thread_.join();
}

void StoreServer::stop_listening() {
  ListenerState open = ListenerState::open;
  listener_state_.compare_exchange_strong(open, ListenerState::closing);
  wake_.notify();
  listener_state_.wait(ListenerState::closing);
}

// Closes the public listener, on the thread that polls it, and the pending connections.
void StoreServer::shut_down() {
  listener_.reset();
  std::erase_if(clients_, [](const Client& client) { return client.handshake != nullptr; });
  listener_state_ = ListenerState::closed;
  listener_state_.notify_all();
}

void StoreServer::run() try {
  std::vector<pollfd> polled;
  while (!stopping_) {
    if (listener_state_ == ListenerState::closing) shut_down();
    polled.clear();
    polled.push_back({wake_.descriptor(), POLLIN, 0});
    const bool listening = Clock::now() >= accept_again_;
    for (os::Fd* listener : {&listener_, &reconnect_listener_})
      polled.push_back({listening ? listener->get() : -1, POLLIN, 0});
    for (const Client& client : clients_) {
      const bool sends = client.handshake ? client.handshake_sends : !client.out.empty();
      polled.push_back({client.fd(), static_cast<short>(sends ? POLLOUT : POLLIN), 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_deadline() - Clock::now());
    const auto wait_ms = std::max<std::chrono::milliseconds::rep>(left.count(), 0);
    if (::poll(polled.data(), polled.size(), static_cast<int>(wait_ms)) < 0 && errno != EINTR)
      os::throw_errno("polling the store's sockets");
    if (polled[0].revents != 0) wake_.clear();
    size_t at = 3;
    for (auto client = clients_.begin(); client != clients_.end(); ++at)
      client = advance(*client, polled[at].revents) ? std::next(client) : clients_.erase(client);
    if (polled[1].revents != 0) accept_some(listener_);
    if (polled[2].revents != 0) accept_some(reconnect_listener_);
  }
} catch (const std::exception&) {
  // Out of memory, or a bug. Closes all connections, so that no client waits for a dead server.
  clients_.clear();
  reconnect_listener_.reset();
  shut_down();
}

Clock::time_point StoreServer::next_deadline() const {
  const auto now = Clock::now();
  auto next = now + kLongest;
  if (accept_again_ > now) next = accept_again_;
  for (const Client& client : clients_) {
    if (client.handshake) next = std::min(next, now + client.handshake->deadline().left());
    if (client.waiting) next = std::min(next, client.wait_end);
  }
  return next;
}

void StoreServer::accept_some(os::Fd& listener) {
  const auto is_pending = [](const Client& client) { return client.handshake != nullptr; };
  auto pending = static_cast<size_t>(std::ranges::count_if(clients_, is_pending));
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    bool exhausted = false;
    os::Fd fd = os::accept_from(listener.get(), &exhausted);
    if (exhausted && !evict()) accept_again_ = Clock::now() + kAcceptPause;
    if (!fd) return;
    os::keep_alive(fd.get());
    if (pending >= max_pending_ && evict()) --pending;
    const uint64_t source = transport::source_of(fd.get());
    clients_.emplace_back(
        transport::Handshake(std::move(fd), transport::Handshake::Role::listener, key_,
                             {std::string(store_frame::kContext), store_frame::kServerRank,
                              store_frame::kClientRank},
                             handshake_limit_),
        source);
    ++pending;
    // Reads the greeting if it has arrived: evict() prefers connections without one.
    if (advance_handshake(clients_.back(), POLLIN)) continue;
    clients_.pop_back();
    --pending;
  }
}

// Closes one of the pending connections; false if there is none.
bool StoreServer::evict() {
  std::vector<transport::Pending> pending;
  std::vector<std::list<Client>::iterator> places;
  for (auto client = clients_.begin(); client != clients_.end(); ++client) {
    if (!client->handshake) continue;
    pending.push_back({client->source, client->handshake->greeted()});
    places.push_back(client);
  }
  if (pending.empty()) return false;
  clients_.erase(places[transport::choose_evicted(pending, random_)]);
  return true;
}

// Called for every client in every round. False: drop the client.
bool StoreServer::advance(Client& client, short events) {
  if (client.handshake) return advance_handshake(client, events);
  if (!client.out.empty()) return events == 0 || send(client);
  if (client.waiting) return events == 0 && answer(client);  // a waiting client must not send
  return events == 0 || receive(client);
}

bool StoreServer::advance_handshake(Client& client, short events) {
  if (events == 0 && !client.handshake->deadline().expired()) return true;
  switch (client.handshake->advance()) {
    case transport::Handshake::Step::want_read:
      client.handshake_sends = false;
      return true;
    case transport::Handshake::Step::want_write:
      client.handshake_sends = true;
      return true;
    case transport::Handshake::Step::refused:
      return false;
    case transport::Handshake::Step::done:
      break;
  }
  client.socket = client.handshake->release();
  client.handshake.reset();
  return true;
}

// Never reads past the end of the current request, so that at most one is in memory.
bool StoreServer::receive(Client& client) {
  auto parsed = store_frame::parse_request(client.in);
  const size_t had = client.in.size();
  client.in.resize(had + std::min(kReadBytes, parsed.needed - had));
  const ssize_t got =
      ::recv(client.socket.get(), client.in.data() + had, client.in.size() - had, 0);
  const int error = errno;
  client.in.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got <= 0) return got < 0 && (error == EAGAIN || error == EINTR);
  parsed = store_frame::parse_request(client.in);
  if (parsed.parse != store_frame::Parse::complete) return parsed.parse == store_frame::Parse::more;
  client.in.clear();
  client.wait_end = Clock::now() + std::min<std::chrono::milliseconds>(
                                       std::chrono::milliseconds(parsed.frame.wait_ms), kLongest);
  client.waiting = std::move(parsed.frame);
  return answer(client);
}

bool StoreServer::answer(Client& client) {
  const store_frame::Request& request = *client.waiting;
  store_frame::Reply reply;
  if (request.verb == store_frame::Verb::hello) {
    reply.value = hello_;
  } else if (request.verb != store_frame::Verb::get) {
    reply = change_once(request);
    // Clients may wait for this change, also those that already had their turn in this round.
    wake_.notify();
  } else if (auto value = keys_.find(request.key)) {
    reply.value = std::move(*value);
  } else {
    if (Clock::now() < client.wait_end) return true;
    reply.status = store_frame::Status::absent;
  }
  client.waiting.reset();
  client.out = store_frame::encode(reply);
  client.sent = 0;
  return send(client);
}

// Applies a change, or returns the kept reply if the change was already applied.
store_frame::Reply StoreServer::change_once(const store_frame::Request& request) {
  if (request.number == 0) return change(request);
  ClientReplies& kept = replies_[request.client];
  kept.oldest = std::max(kept.oldest, request.oldest);
  kept.replies.erase(kept.replies.begin(), kept.replies.lower_bound(kept.oldest));
  if (request.number < kept.oldest)
    return {store_frame::Status::refused, "outdated request: its client no longer waits for it"};
  const auto found = kept.replies.find(request.number);
  if (found != kept.replies.end()) return found->second;
  return kept.replies.emplace(request.number, change(request)).first->second;
}

// Applies a set, add, remove or claim.
store_frame::Reply StoreServer::change(const store_frame::Request& request) {
  if (request.verb == store_frame::Verb::set) {
    const bool fits = keys_.set_within(request.key, request.value, kMaxStoreBytes);
    return {fits ? store_frame::Status::ok : store_frame::Status::full, ""};
  }
  if (request.verb == store_frame::Verb::remove) {
    auto value = keys_.remove(request.key);
    if (!value) return {store_frame::Status::absent, ""};
    return {store_frame::Status::ok, std::move(*value)};
  }
  if (request.verb == store_frame::Verb::claim) {
    auto value = keys_.claim_within(request.key, request.value, kMaxStoreBytes);
    if (!value) return {store_frame::Status::full, ""};
    return {store_frame::Status::ok, std::move(*value)};
  }
  int64_t amount = 0;
  const char* end = request.value.data() + request.value.size();
  const auto parsed = std::from_chars(request.value.data(), end, amount);
  if (parsed.ec != std::errc{} || parsed.ptr != end)
    return {store_frame::Status::refused, "invalid amount of an add: not a 64-bit integer"};
  try {
    const auto sum = keys_.add_within(request.key, amount, kMaxStoreBytes);
    if (!sum) return {store_frame::Status::full, ""};
    return {store_frame::Status::ok, std::to_string(*sum)};
  } catch (const InvalidArgument& error) {
    return {store_frame::Status::refused, error.what()};
  }
}

bool StoreServer::send(Client& client) {
  while (client.sent < client.out.size()) {
    const ssize_t got = ::send(client.socket.get(), client.out.data() + client.sent,
                               client.out.size() - client.sent, MSG_NOSIGNAL);
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0 && errno != EINTR) return false;
    if (got > 0) client.sent += static_cast<size_t>(got);
  }
  client.out.clear();
  return true;
}

}  // namespace pycomm::rendezvous
