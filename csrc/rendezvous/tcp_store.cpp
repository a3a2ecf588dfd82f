// See tcp_store.h.
#include "rendezvous/tcp_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "os/random.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_server.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {

using store_frame::Parse;
using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

namespace {

constexpr std::chrono::milliseconds kFirstPause{50}, kLongestPause{1000};
// Minimum limit of the last attempt, at the deadline: enough to get the reason of its failure.
constexpr std::chrono::milliseconds kShortestAttempt{50};
// Maximum delay of a healthy server's reply `absent` after the requested wait.
constexpr std::chrono::milliseconds kAnswerSlack{300};
// A get repeats its request after this time, so that other calls can use the connection.
constexpr std::chrono::milliseconds kLongestWait{100};
// A connection without an answer for this time, doubled each time, is replaced: a firewall or load
// balancer that dropped the flow discards what is sent on it.
constexpr std::chrono::seconds kSilence{3};
// Maximum connections that one call may lose in a row.
constexpr int kMostLost = 5;

void check_sizes(const std::string& key, const std::string& value) {
  if (key.empty() || key.size() > store_frame::kMaxKeyBytes)
    throw InvalidArgument("invalid key: a store's key must have 1 to " +
                          std::to_string(store_frame::kMaxKeyBytes) + " bytes, got " +
                          std::to_string(key.size()));
  if (value.size() > store_frame::kMaxValueBytes)
    throw InvalidArgument("invalid value of the key '" + key + "': it must have at most " +
                          std::to_string(store_frame::kMaxValueBytes) + " bytes, got " +
                          std::to_string(value.size()));
}

uint64_t random_number() {
  const auto bytes = os::random_bytes();
  uint64_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

}  // namespace

TcpStore::TcpStore(std::string host, uint16_t port, std::string key, StoreHooks hooks)
    : host_(std::move(host)),
      port_(port),
      key_(std::move(key)),
      hooks_(std::move(hooks)),
      client_(random_number()) {}

TcpStore::~TcpStore() = default;

std::unique_ptr<TcpStore> TcpStore::serve(const std::string& host, uint16_t port,
                                          const std::string& key) {
  std::unique_ptr<TcpStore> store(new TcpStore(host, port, key, {}));
  store->server_ = std::make_unique<StoreServer>(os::tcp_address(host, port), key);
  store->port_ = store->server_->port();
  return store;
}

std::unique_ptr<TcpStore> TcpStore::connect(const std::string& host, uint16_t port,
                                            const std::string& key, const Deadline& deadline,
                                            StoreHooks hooks) {
  if (key.empty()) throw InvalidArgument("the key of a store is empty");
  std::unique_ptr<TcpStore> store(new TcpStore(host, port, key, std::move(hooks)));
  store->idle_.push_back({store->open(deadline), {}, 0});
  store->was_there_ = true;
  return store;
}

std::string TcpStore::name() const {
  const bool ipv6 = host_.find(':') != std::string::npos;
  return (ipv6 ? "[" + host_ + "]" : host_) + ":" + std::to_string(port_);
}

// Waits for one of the events; false at the deadline or after an interruption. It polls at least
// once, so that a call that cleans up after an interruption still gets an immediate answer.
bool TcpStore::wait(int fd, short events, const Deadline& deadline) const {
  do {
    const auto slice = std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left());
    if (os::poll_one(fd, events, slice) != 0) return true;
  } while (!interrupted() && !deadline.expired());
  return false;
}

void TcpStore::check_interrupted() const {
  if (interrupted()) throw GroupBroken("waiting for the store at " + name() + " was interrupted");
}

// Checks that a new connection leads to the same server as the first one. If not, an empty Fd and
// the reason.
os::Fd TcpStore::greet(os::Fd fd, const Deadline& deadline, Failure& failure) {
  ServerConnection connection{std::move(fd), {}, 0};
  bool usable = true;
  std::optional<store_frame::Reply> reply;
  try {
    reply = exchange(connection, {store_frame::Verb::hello, 0, "", ""}, deadline, usable);
  } catch (const PeerLost& error) {
    failure = {error.what()};
    return {};
  }
  if (!reply) {
    failure = {"the server did not answer in time"};
    return {};
  }
  std::istringstream text(reply->value);
  std::string name;
  uint16_t port = 0;
  if (!(text >> name >> port)) {
    failure = {"invalid reply to the first request: the server did not send its name and port"};
    return {};
  }
  if (!server_name_.empty() && name != server_name_) {
    failure = {"a different server listens there", true};
    return {};
  }
  if (server_name_.empty()) {  // in connect(): no other thread has the store yet
    server_name_ = name;
    reconnect_port_ = port;
  }
  return std::move(connection.fd);
}

// One attempt to connect, with the handshake. An empty Fd and the reason if it fails.
os::Fd TcpStore::attempt(const os::Address& address, const Deadline& deadline, Failure& failure) {
  const auto limit = std::clamp<std::chrono::nanoseconds>(deadline.left(), kShortestAttempt,
                                                          transport::kHandshakeLimit);
  transport::Handshake handshake(
      os::start_connect(address), transport::Handshake::Role::connector, key_,
      {std::string(store_frame::kContext), store_frame::kClientRank, store_frame::kServerRank},
      limit);
  while (true) {
    short events = POLLIN;
    switch (handshake.advance()) {
      case transport::Handshake::Step::done:
        os::keep_alive(handshake.fd());
        return greet(handshake.release(), handshake.deadline(), failure);
      case transport::Handshake::Step::refused:
        failure = {handshake.why(), handshake.has_no_listener()};
        return {};
      case transport::Handshake::Step::want_write:
        events = POLLOUT;
        break;
      case transport::Handshake::Step::want_read:
        break;
    }
    if (!wait(handshake.fd(), events, handshake.deadline())) check_interrupted();
  }
}

// Tries each address of the server once. A lost connection is replaced at the port that stays open.
os::Fd TcpStore::attempt_all(const Deadline& deadline, Failure& failure) {
  bool settled = false;
  {
    const std::lock_guard lock(mutex_);
    settled = settled_;
  }
  std::vector<uint16_t> ports;
  if (!settled) ports.push_back(port_);
  if (reconnect_port_ != 0) ports.push_back(reconnect_port_);
  for (const uint16_t port : ports) {
    try {
      for (const os::Address& address : os::tcp_addresses(host_, port)) {
        try {
          if (os::Fd fd = attempt(address, deadline, failure)) return fd;
        } catch (const PeerLost& error) {  // no route yet
          failure = {error.what()};
        }
      }
    } catch (const InvalidArgument& error) {  // a name not known yet
      failure = {error.what()};
    }
  }
  return {};
}

os::Fd TcpStore::open(const Deadline& deadline) {
  std::chrono::nanoseconds pause = kFirstPause;
  for (int attempts = 1;; ++attempts) {
    Failure last;
    if (os::Fd fd = attempt_all(deadline, last)) return fd;
    if (was_there_ && last.no_server)
      throw PeerLost("the store at " + name() + " has gone: " + last.why);
    pause = std::min(pause, deadline.left());
    const double pause_s = std::chrono::duration<double>(pause).count();
    std::ostringstream text;
    text.precision(3);
    if (deadline.expired()) {
      text << "no connection to the store at " << name() << " within " << deadline.limit_s()
           << " s, after " << attempts
           << " attempts; the last one failed with reason: " << last.why;
      ErrorFields fields;
      fields.elapsed_s = deadline.elapsed_s();
      throw Timeout(text.str(), fields);
    }
    text << "connect addr=" << name() << " failed " << attempts
         << " times with reason: " << last.why << " retry after " << pause_s << " seconds";
    if (hooks_.log) hooks_.log(text.str());
    // There is no event for a new listener: try again after a pause.
    for (const Deadline next(pause); !next.expired(); check_interrupted())
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kPollInterval, next.left()));
    pause = std::min<std::chrono::nanoseconds>(pause * 2, kLongestPause);
  }
}

// This and receive() return false if wait() does, and throw PeerLost if the server closed the
// connection.
bool TcpStore::send_all(int fd, const std::string& bytes, const Deadline& deadline) const {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t got = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    const int error = errno;
    if (got >= 0)
      sent += static_cast<size_t>(got);
    else if (error == EAGAIN && !wait(fd, POLLOUT, deadline))
      return false;
    else if (error != EAGAIN && error != EINTR)
      throw PeerLost(std::generic_category().message(error));
  }
  return true;
}

bool TcpStore::receive(ServerConnection& connection, const Deadline& deadline,
                       store_frame::Reply& reply) const {
  std::string& bytes = connection.in;
  while (true) {
    auto parsed = store_frame::parse_reply(bytes);
    if (parsed.parse == store_frame::Parse::broken)
      throw InternalError("invalid reply from the store at " + name() + ": not a reply frame");
    if (parsed.parse == store_frame::Parse::complete) {
      reply = std::move(parsed.frame);
      bytes.clear();
      return true;
    }
    const size_t had = bytes.size();
    bytes.resize(parsed.needed);
    const ssize_t got = ::recv(connection.fd.get(), bytes.data() + had, bytes.size() - had, 0);
    const int error = errno;
    bytes.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) throw PeerLost("it closed the connection");
    if (got > 0 || error == EINTR) continue;
    if (error != EAGAIN) throw PeerLost(std::generic_category().message(error));
    if (!wait(connection.fd.get(), POLLIN, deadline)) return false;
  }
}

// A connection for one call: an idle one, or a new one while more may be opened. Nothing if all are
// in use until the deadline.
std::optional<TcpStore::ServerConnection> TcpStore::take(const Deadline& deadline) {
  {
    std::unique_lock lock(mutex_);
    while (idle_.empty() && settled_ && in_use_ > 0) {
      if (deadline.expired()) return std::nullopt;
      given_back_.wait_for(lock,
                           std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()));
      lock.unlock();
      check_interrupted();
      lock.lock();
    }
    ++in_use_;
    if (!idle_.empty()) {
      ServerConnection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  try {
    return ServerConnection{open(deadline), {}, 0};
  } catch (...) {
    give_back(std::nullopt);
    throw;
  }
}

// `connection` is empty if it was lost.
void TcpStore::give_back(std::optional<ServerConnection> connection) {
  {
    const std::lock_guard lock(mutex_);
    --in_use_;
    if (connection) idle_.push_back(std::move(*connection));
  }
  given_back_.notify_all();
}

// One request and its reply; nothing at the deadline or after an interruption. `usable`: whether
// the connection can be used again.
std::optional<store_frame::Reply> TcpStore::exchange(ServerConnection& connection,
                                                     const store_frame::Request& request,
                                                     const Deadline& answer_by,
                                                     bool& usable) const {
  usable = send_all(connection.fd.get(), store_frame::encode(request), answer_by);
  if (!usable) return std::nullopt;  // it carries a partial request
  ++connection.unread_replies;
  store_frame::Reply answer;
  while (connection.unread_replies > 0 && receive(connection, answer_by, answer))
    --connection.unread_replies;
  if (connection.unread_replies > 0) return std::nullopt;
  return answer;
}

// The reply, if necessary on a new connection; nothing at the deadline or after an interruption.
std::optional<store_frame::Reply> TcpStore::ask(const store_frame::Request& request,
                                                const Deadline& deadline,
                                                std::chrono::milliseconds slack) {
  const Deadline answer_by(deadline.left() + slack);
  std::chrono::nanoseconds silence = kSilence;
  for (int lost = 0;;) {
    std::optional<ServerConnection> connection = take(deadline);
    if (!connection) return std::nullopt;
    const bool last = answer_by.left() <= silence;
    std::optional<store_frame::Reply> answer;
    bool usable = true;
    try {
      answer = exchange(*connection, request, last ? answer_by : Deadline(silence), usable);
    } catch (const PeerLost& error) {
      give_back(std::nullopt);
      if (++lost == kMostLost)
        throw PeerLost("the store at " + name() + " has gone: " + error.what());
      continue;
    } catch (...) {
      give_back(std::nullopt);
      throw;
    }
    const bool over = answer || last || interrupted();
    if (!over || !usable) connection.reset();
    give_back(std::move(connection));
    if (over) return answer;
    silence *= 2;
  }
}

void TcpStore::finish(uint64_t number) {
  const std::lock_guard lock(mutex_);
  in_flight_.erase(number);
}

// The reply to a request that changes a key.
store_frame::Reply TcpStore::change(store_frame::Request request, const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    request.client = client_;
    request.number = next_number_++;
    in_flight_.insert(request.number);
    request.oldest = *in_flight_.begin();
  }
  const auto ask_once = [&] {
    try {
      return ask(request, deadline);
    } catch (...) {
      finish(request.number);
      throw;
    }
  };
  auto reply = ask_once();
  finish(request.number);
  if (!reply) {
    check_interrupted();
    ErrorFields fields;
    fields.elapsed_s = deadline.elapsed_s();
    std::ostringstream text;
    text.precision(3);
    text << "the store at " << name() << " did not change the key '" << request.key << "' within "
         << deadline.limit_s()
         << " s: the process that serves it (rank 0) is stopped or cannot be reached";
    throw Timeout(text.str(), fields);
  }
  if (reply->status == store_frame::Status::full)
    throw InvalidArgument("the store at " + name() + " is full: it holds at most " +
                          std::to_string(store_frame::kMaxStoreBytes) + " bytes");
  if (reply->status == store_frame::Status::refused) throw InvalidArgument(reply->value);
  return std::move(*reply);
}

void TcpStore::set(const std::string& key, const std::string& value, const Deadline& deadline) {
  check_sizes(key, value);
  if (!server_) {
    change({store_frame::Verb::set, 0, key, value}, deadline);
    return;
  }
  server_->keys().set(key, value);
  server_->wake();
}

std::string TcpStore::get(const std::string& key, const Deadline& deadline) {
  check_sizes(key, "");
  if (server_) return server_->keys().get(key, deadline);
  do {
    const auto wait = std::min<std::chrono::nanoseconds>(deadline.left(), kLongestWait);
    const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
    auto reply = ask({store_frame::Verb::get, static_cast<uint32_t>(wait_ms), key, ""}, deadline,
                     kAnswerSlack);
    if (reply && reply->status == store_frame::Status::ok) return std::move(reply->value);
    if (!reply) check_interrupted();
  } while (!deadline.expired());
  throw_key_timeout(key, deadline, "the store at " + name());
}

int64_t TcpStore::add(const std::string& key, int64_t amount, const Deadline& deadline) {
  check_sizes(key, "");
  if (server_) {
    const int64_t sum = server_->keys().add(key, amount);
    server_->wake();
    return sum;
  }
  const store_frame::Reply reply =
      change({store_frame::Verb::add, 0, key, std::to_string(amount)}, deadline);
  int64_t sum = 0;
  const char* end = reply.value.data() + reply.value.size();
  const auto parsed = std::from_chars(reply.value.data(), end, sum);
  check(parsed.ec == std::errc{} && parsed.ptr == end,
        "invalid reply to ADD from the store at " + name() + ": '" + reply.value + "'");
  return sum;
}

std::optional<std::string> TcpStore::remove(const std::string& key, const Deadline& deadline) {
  check_sizes(key, "");
  if (server_) return server_->keys().remove(key);
  store_frame::Reply reply = change({store_frame::Verb::remove, 0, key, ""}, deadline);
  if (reply.status != store_frame::Status::ok) return std::nullopt;
  return std::move(reply.value);
}

std::string TcpStore::claim(const std::string& key, const std::string& value,
                            const Deadline& deadline) {
  check_sizes(key, value);
  if (!server_) return change({store_frame::Verb::claim, 0, key, value}, deadline).value;
  std::string held = server_->keys().claim(key, value);
  server_->wake();
  return held;
}

void TcpStore::settle() {
  if (server_) return server_->stop_listening();
  const std::lock_guard lock(mutex_);
  settled_ = true;
}

}  // namespace pycomm::rendezvous
