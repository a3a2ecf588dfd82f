// See server_connections.h.
#include "rendezvous/server_connections.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <sstream>
#include <thread>

#include "transport/handshake.h"

namespace pycomm::rendezvous {
namespace {

constexpr std::chrono::milliseconds kFirstPause{50}, kLongestPause{1000};
// Minimum limit of the last attempt, at the deadline: enough to get the reason of its failure.
constexpr std::chrono::milliseconds kShortestAttempt{50};

[[noreturn]] void throw_unreachable(const std::string& server, const Deadline& deadline,
                                    int attempts, const std::string& why) {
  std::ostringstream text;
  text.precision(3);
  text << "no connection to the store at " << server << " within " << deadline.limit_s()
       << " s, after " << attempts << " attempts; the last one failed with reason: " << why;
  ErrorFields fields;
  fields.elapsed_s = deadline.elapsed_s();
  throw Timeout(text.str(), fields);
}

std::string retry_line(const std::string& server, int attempts, const std::string& why,
                       std::chrono::nanoseconds pause) {
  std::ostringstream text;
  text.precision(3);
  text << "connect addr=" << server << " failed " << attempts << " times with reason: " << why
       << " retry after " << std::chrono::duration<double>(pause).count() << " seconds";
  return text.str();
}

}  // namespace

std::optional<store_frame::Reply> ServerConnection::exchange(const store_frame::Request& request,
                                                             const Deadline& answer_by) {
  usable_ = send_all(store_frame::encode(request), answer_by);
  if (!usable_) return std::nullopt;
  ++unread_replies_;
  store_frame::Reply answer;
  while (unread_replies_ > 0 && receive(answer_by, answer)) --unread_replies_;
  if (unread_replies_ > 0) return std::nullopt;
  return answer;
}

// This and receive() return false if wait() does.
bool ServerConnection::send_all(const std::string& bytes, const Deadline& deadline) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t got = ::send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    const int error = errno;
    if (got >= 0)
      sent += static_cast<size_t>(got);
    else if (error == EAGAIN && !wait_->wait(fd_.get(), POLLOUT, deadline))
      return false;
    else if (error != EAGAIN && error != EINTR)
      throw PeerLost(os::error_text(error));
  }
  return true;
}

bool ServerConnection::receive(const Deadline& deadline, store_frame::Reply& reply) {
  while (true) {
    auto parsed = store_frame::parse_reply(in_);
    if (parsed.parse == store_frame::Parse::broken)
      throw InternalError("invalid reply from the store at " + wait_->server() +
                          ": not a reply frame");
    if (parsed.parse == store_frame::Parse::complete) {
      reply = std::move(parsed.frame);
      in_.clear();
      return true;
    }
    const size_t had = in_.size();
    in_.resize(parsed.needed);
    const ssize_t got = ::recv(fd_.get(), in_.data() + had, in_.size() - had, 0);
    const int error = errno;
    in_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) throw PeerLost("it closed the connection");
    if (got > 0 || error == EINTR) continue;
    if (error != EAGAIN) throw PeerLost(os::error_text(error));
    if (!wait_->wait(fd_.get(), POLLIN, deadline)) return false;
  }
}

ServerDialer::ServerDialer(std::string host, uint16_t port, std::string key, const ClientWait& wait,
                           std::function<void(const std::string&)> log)
    : host_(std::move(host)),
      port_(port),
      key_(std::move(key)),
      wait_(wait),
      log_(std::move(log)) {}

ServerConnection ServerDialer::open(const Deadline& deadline) {
  std::chrono::nanoseconds length = kFirstPause;
  for (int attempts = 1;; ++attempts) {
    Failure last;
    if (auto connection = attempt_all(deadline, last)) return std::move(*connection);
    if (!server_name_.empty() && last.no_server)
      throw PeerLost("lost the store at " + wait_.server() + ": " + last.why);
    length = std::min(length, deadline.left());
    if (deadline.expired()) throw_unreachable(wait_.server(), deadline, attempts, last.why);
    if (log_) log_(retry_line(wait_.server(), attempts, last.why, length));
    pause(length);
    length = std::min<std::chrono::nanoseconds>(length * 2, kLongestPause);
  }
}

// There is no event for a new listener: the next attempt follows a pause.
void ServerDialer::pause(std::chrono::nanoseconds length) const {
  for (const Deadline next(length); !next.expired(); wait_.check_interrupted())
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kPollInterval, next.left()));
}

// Tries each address of the server once. A lost connection is replaced at the port that stays open.
std::optional<ServerConnection> ServerDialer::attempt_all(const Deadline& deadline,
                                                          Failure& failure) {
  std::vector<uint16_t> ports;
  if (!only_reconnects_) ports.push_back(port_);
  if (reconnect_port_ != 0) ports.push_back(reconnect_port_);
  for (const uint16_t port : ports) {
    try {
      for (const os::Address& address : os::tcp_addresses(host_, port)) {
        try {
          if (auto connection = attempt(address, deadline, failure)) return connection;
        } catch (const PeerLost& error) {  // no route yet
          failure = {error.what()};
        }
      }
    } catch (const InvalidArgument& error) {  // a name not known yet
      failure = {error.what()};
    }
  }
  return std::nullopt;
}

// One attempt to connect, with the handshake. Nothing and the reason if it fails.
std::optional<ServerConnection> ServerDialer::attempt(const os::Address& address,
                                                      const Deadline& deadline, Failure& failure) {
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
        return std::nullopt;
      case transport::Handshake::Step::want_write:
        events = POLLOUT;
        break;
      case transport::Handshake::Step::want_read:
        break;
    }
    if (!wait_.wait(handshake.fd(), events, handshake.deadline())) wait_.check_interrupted();
  }
}

// Checks that a new connection leads to the same server as the first one. If not, nothing and the
// reason.
std::optional<ServerConnection> ServerDialer::greet(os::Fd fd, const Deadline& deadline,
                                                    Failure& failure) {
  ServerConnection connection(std::move(fd), wait_);
  std::optional<store_frame::Reply> reply;
  try {
    reply = connection.exchange({store_frame::Verb::hello, 0, "", ""}, deadline);
  } catch (const PeerLost& error) {  // the reason of this failed attempt
    failure = {error.what()};
    return std::nullopt;
  }
  if (!reply) {
    failure = {"the server did not answer in time"};
    return std::nullopt;
  }
  std::istringstream text(reply->value);
  std::string name;
  uint16_t port = 0;
  if (!(text >> name >> port)) {
    failure = {"invalid reply to the first request: the server did not send its name and port"};
    return std::nullopt;
  }
  if (!server_name_.empty() && name != server_name_) {
    failure = {"a different server listens there", true};
    return std::nullopt;
  }
  if (server_name_.empty()) {  // the first connection: no other thread uses the client yet
    server_name_ = name;
    reconnect_port_ = port;
  }
  return connection;
}

std::optional<ServerConnection> ConnectionPool::take(const Deadline& deadline) {
  {
    std::unique_lock lock(mutex_);
    const auto turn = turns_.insert(turns_.end(), std::monostate{});
    const auto may_take = [&] {
      return turn == turns_.begin() && (!idle_.empty() || !fixed_size_ || in_use_ == 0);
    };
    bool interrupted = false;
    while (!may_take() && !interrupted && !deadline.expired()) {
      changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left()));
      lock.unlock();
      interrupted = wait_.is_interrupted();
      lock.lock();
    }
    const bool may = may_take();
    turns_.erase(turn);
    changed_.notify_all();
    if (!may) {
      lock.unlock();
      wait_.check_interrupted();
      return std::nullopt;
    }
    ++in_use_;
    if (!idle_.empty()) {
      ServerConnection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  try {
    return dialer_.open(deadline);
  } catch (...) {  // no connection is in use
    give_back(std::nullopt);
    throw;
  }
}

void ConnectionPool::give_back(std::optional<ServerConnection> connection) {
  {
    const std::lock_guard lock(mutex_);
    --in_use_;
    if (connection) idle_.push_back(std::move(*connection));
  }
  changed_.notify_all();
}

void ConnectionPool::stop_growing() {
  dialer_.only_reconnect();
  const std::lock_guard lock(mutex_);
  fixed_size_ = true;
}

}  // namespace pycomm::rendezvous
