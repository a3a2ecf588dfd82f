// See tcp_store.h.
#include "rendezvous/tcp_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_server.h"
#include "transport/handshake.h"

namespace pycomm {

using store_frame::Parse;
using store_frame::Reply;
using store_frame::Request;
using store_frame::Status;
using store_frame::Verb;

namespace {

constexpr std::chrono::milliseconds kFirstPause{50}, kLongestPause{1000};
// The last attempt, at the deadline, has so long: enough to hear why it fails.
constexpr std::chrono::milliseconds kShortestAttempt{50};
constexpr std::chrono::seconds kSetLimit{30};
// How much later than the wait that it was asked for a healthy server's "absent" may come.
constexpr std::chrono::milliseconds kAnswerSlack{500};
constexpr std::chrono::hours kLongestWait{1};

void check_sizes(const std::string& key, const std::string& value) {
  if (key.empty() || key.size() > store_frame::kMaxKeyBytes)
    throw InvalidArgument("a key of a store has 1 to " + std::to_string(store_frame::kMaxKeyBytes) +
                          " bytes, this one " + std::to_string(key.size()));
  if (value.size() > store_frame::kMaxValueBytes)
    throw InvalidArgument("a value in a store has at most " +
                          std::to_string(store_frame::kMaxValueBytes) + " bytes, that of '" + key +
                          "' has " + std::to_string(value.size()));
}

// Connects and shakes hands once. An empty Fd and the reason if that fails.
Fd attempt(const Address& address, const std::string& key, const Deadline& deadline,
           std::string& why) {
  const auto limit =
      std::clamp<std::chrono::nanoseconds>(deadline.left(), kShortestAttempt, kHandshakeLimit);
  Handshake handshake(
      start_connect(address), Handshake::Role::connector, key,
      {std::string(store_frame::kContext), store_frame::kClientRank, store_frame::kServerRank},
      limit);
  while (true) {
    short events = POLLIN;
    switch (handshake.advance()) {
      case Handshake::Step::done:
        return handshake.release();
      case Handshake::Step::refused:
        why = handshake.why();
        return {};
      case Handshake::Step::want_write:
        events = POLLOUT;
        break;
      case Handshake::Step::want_read:
        break;
    }
    poll_one(handshake.fd(), events, handshake.deadline().left());
  }
}

// Both return false at the deadline and throw PeerLost when the other end has gone.
bool send_all(int fd, const std::string& bytes, const Deadline& deadline) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t got = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (got >= 0)
      sent += static_cast<size_t>(got);
    else if (errno == EAGAIN && poll_one(fd, POLLOUT, deadline.left()) == 0)
      return false;
    else if (errno != EAGAIN && errno != EINTR)
      throw PeerLost(std::generic_category().message(errno));
  }
  return true;
}

bool receive_reply(int fd, const Deadline& deadline, Reply& reply) {
  std::string bytes;
  while (true) {
    auto parsed = store_frame::parse_reply(bytes);
    if (parsed.parse == Parse::broken)
      throw InternalError("the store's server answered with bytes that are no reply");
    if (parsed.parse == Parse::complete) {
      reply = std::move(parsed.frame);
      return true;
    }
    const size_t had = bytes.size();
    bytes.resize(parsed.needed);
    const ssize_t got = ::recv(fd, bytes.data() + had, bytes.size() - had, 0);
    const int error = errno;
    bytes.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) throw PeerLost("it closed the connection");
    if (got > 0 || error == EINTR) continue;
    if (error != EAGAIN) throw PeerLost(std::generic_category().message(error));
    if (poll_one(fd, POLLIN, deadline.left()) == 0) return false;
  }
}

}  // namespace

TcpStore::TcpStore(std::string host, uint16_t port, std::string key, Log log)
    : host_(std::move(host)), port_(port), key_(std::move(key)), log_(std::move(log)) {}

TcpStore::~TcpStore() = default;

std::unique_ptr<TcpStore> TcpStore::serve(const std::string& host, uint16_t port,
                                          const std::string& key) {
  std::unique_ptr<TcpStore> store(new TcpStore(host, port, key, {}));
  store->server_ = std::make_unique<StoreServer>(tcp_address(host, port), key);
  store->port_ = store->server_->port();
  return store;
}

std::unique_ptr<TcpStore> TcpStore::connect(const std::string& host, uint16_t port,
                                            const std::string& key, const Deadline& deadline,
                                            Log log) {
  if (key.empty()) throw InvalidArgument("the key of a store is empty");
  std::unique_ptr<TcpStore> store(new TcpStore(host, port, key, std::move(log)));
  store->idle_.push_back(store->open(deadline));
  return store;
}

std::string TcpStore::name() const { return host_ + ":" + std::to_string(port_); }

Fd TcpStore::open(const Deadline& deadline) const {
  std::chrono::nanoseconds pause = kFirstPause;
  for (int attempts = 1;; ++attempts) {
    std::string why;
    try {
      if (Fd fd = attempt(tcp_address(host_, port_), key_, deadline, why)) return fd;
    } catch (const Error& error) {  // no route yet, a name not known yet
      why = error.what();
    }
    pause = std::min(pause, deadline.left());
    const double pause_s = std::chrono::duration<double>(pause).count();
    std::ostringstream text;
    text.precision(3);
    if (deadline.expired()) {
      text << "no connection to the store at " << name() << " within " << deadline.limit_s()
           << " s, after " << attempts << " attempts; the last one failed with reason: " << why;
      ErrorFields fields;
      fields.elapsed_s = deadline.elapsed_s();
      throw Timeout(text.str(), fields);
    }
    text << "connect addr=" << name() << " failed " << attempts << " times with reason: " << why
         << " retry after " << pause_s << " seconds";
    if (log_) log_(text.str());
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(pause * 2, kLongestPause);
  }
}

// A connection of one's own, so that a call that waits keeps nobody else from calling.
Fd TcpStore::take(const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Fd fd = std::move(idle_.back());
      idle_.pop_back();
      return fd;
    }
  }
  return open(deadline);
}

// A reply of `absent` also when the server does not answer in time.
Reply TcpStore::ask(const Request& request, const Deadline& deadline) {
  Fd fd = take(deadline);
  const Deadline answer_by(deadline.left() + kAnswerSlack);
  Reply reply;
  try {
    // A connection that is not given back is closed: its late reply can be nobody else's.
    if (!send_all(fd.get(), store_frame::encode(request), answer_by) ||
        !receive_reply(fd.get(), answer_by, reply))
      return {Status::absent, ""};
  } catch (const PeerLost& error) {
    throw PeerLost("the store at " + name() + " has gone: " + error.what());
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(fd));
  return reply;
}

void TcpStore::set(const std::string& key, const std::string& value) {
  check_sizes(key, value);
  if (server_) {
    server_->keys().set(key, value);
    server_->wake();
    return;
  }
  const Deadline deadline(kSetLimit);
  switch (ask({Verb::set, 0, key, value}, deadline).status) {
    case Status::ok:
      return;
    case Status::full:
      throw InvalidArgument("the store at " + name() + " is full: it holds at most " +
                            std::to_string(StoreServer::kMaxStoreBytes) + " bytes");
    case Status::absent:
      break;
  }
  ErrorFields fields;
  fields.elapsed_s = deadline.elapsed_s();
  throw Timeout("the store at " + name() + " did not take the key '" + key + "' within 30 s",
                fields);
}

std::string TcpStore::get(const std::string& key, const Deadline& deadline) {
  check_sizes(key, "");
  if (server_) return server_->keys().get(key, deadline);
  do {
    const auto wait = std::min<std::chrono::nanoseconds>(deadline.left(), kLongestWait);
    const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
    Reply reply = ask({Verb::get, static_cast<uint32_t>(wait_ms), key, ""}, deadline);
    if (reply.status == Status::ok) return std::move(reply.value);
  } while (!deadline.expired());
  throw_key_timeout(key, deadline, "the store at " + name());
}

}  // namespace pycomm
