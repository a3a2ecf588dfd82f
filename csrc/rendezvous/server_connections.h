// The connections of a client of the TCP store: their requests, how they are opened, and which call
// uses which.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "os/fd.h"
#include "os/socket.h"
#include "rendezvous/store_frame.h"

namespace pycomm::rendezvous {

// The waits: each ends at its deadline, or when the program interrupts the client.
class ClientWait {
 public:
  // `server`: its address, for errors. `interrupted`: StoreHooks::interrupted.
  ClientWait(std::string server, std::function<bool()> interrupted)
      : server_(std::move(server)), interrupted_(std::move(interrupted)) {}

  const std::string& server() const { return server_; }
  bool is_interrupted() const { return interrupted_ && interrupted_(); }
  void check_interrupted() const {
    if (is_interrupted())
      throw GroupBroken("waiting for the store at " + server_ + " was interrupted");
  }

  // Waits for one of the events; false at the deadline or after an interruption. It polls at least
  // once, so that a call that cleans up after an interruption still gets an immediate answer.
  bool wait(int fd, short events, const Deadline& deadline) const {
    do {
      const auto slice = std::min<std::chrono::nanoseconds>(kPollInterval, deadline.left());
      if (os::poll_one(fd, events, slice) != 0) return true;
    } while (!is_interrupted() && !deadline.expired());
    return false;
  }

 private:
  std::string server_;
  std::function<bool()> interrupted_;
};

// One connection, after the handshake. Used by one thread at a time.
class ServerConnection {
 public:
  ServerConnection(os::Fd fd, const ClientWait& wait) : fd_(std::move(fd)), wait_(&wait) {}

  // The reply; nothing at the deadline or after an interruption. A reply to an earlier request, if
  // it arrives late, is discarded. Throws PeerLost if the connection was closed, InternalError if
  // the reply is invalid.
  std::optional<store_frame::Reply> exchange(const store_frame::Request& request,
                                             const Deadline& answer_by);
  // False after exchange() sent a part of a request.
  bool is_usable() const { return usable_; }

 private:
  bool send_all(const std::string& bytes, const Deadline& deadline);
  bool receive(const Deadline& deadline, store_frame::Reply& reply);

  os::Fd fd_;
  const ClientWait* wait_;
  std::string in_;             // a partial reply
  size_t unread_replies_ = 0;  // to requests sent so far
  bool usable_ = true;
};

// Opens connections, with the handshake. The first one leads to any server with the same key; all
// others must lead to the same server again.
class ServerDialer {
 public:
  // `log` receives a line for each failed attempt; it may be empty.
  ServerDialer(std::string host, uint16_t port, std::string key, const ClientWait& wait,
               std::function<void(const std::string&)> log);

  // Retries with pauses that double up to a second. Throws Timeout with the last reason, PeerLost
  // if the server ended, GroupBroken after an interruption. Thread-safe once it has succeeded.
  ServerConnection open(const Deadline& deadline);
  // From now on the server's public port is closed: connects at its other port only. Thread-safe.
  void only_reconnect() { only_reconnects_ = true; }

 private:
  struct Failure {
    std::string why{};
    bool no_server = false;  // nothing listens there, or another server does
  };

  std::optional<ServerConnection> attempt_all(const Deadline& deadline, Failure& failure);
  std::optional<ServerConnection> attempt(const os::Address& address, const Deadline& deadline,
                                          Failure& failure);
  std::optional<ServerConnection> greet(os::Fd fd, const Deadline& deadline, Failure& failure);
  void pause(std::chrono::nanoseconds length) const;

  std::string host_;
  uint16_t port_;
  std::string key_;
  const ClientWait& wait_;
  std::function<void(const std::string&)> log_;
  std::atomic<bool> only_reconnects_{false};
  std::string server_name_;      // its random name; empty before the first connection
  uint16_t reconnect_port_ = 0;  // its port for clients that lost a connection
};

// Thread-safe. Calls take connections in the order of their arrival: a get that repeats its request
// would otherwise take a connection back before the call that waits for it wakes.
class ConnectionPool {
 public:
  ConnectionPool(ServerDialer& dialer, const ClientWait& wait) : dialer_(dialer), wait_(wait) {}

  // A connection for one call: an idle one, or a new one while more may be opened. Nothing if all
  // are in use until the deadline. Throws as ServerDialer::open().
  std::optional<ServerConnection> take(const Deadline& deadline);
  // After each take() that returned one. `connection` is empty if it was lost.
  void give_back(std::optional<ServerConnection> connection);
  // From now on opens a connection only if all were lost.
  void stop_growing();

 private:
  ServerDialer& dialer_;
  const ClientWait& wait_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::monostate> turns_;  // one for each take() that waits, in order of arrival
  std::vector<ServerConnection> idle_;
  size_t in_use_ = 0;
  bool fixed_size_ = false;
};

}  // namespace pycomm::rendezvous
