// Opens a client's connections to the server of the TCP store, with the handshake. The first one
// leads to any server with the same key; all others must lead to the same server again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/socket.h"
#include "rendezvous/client_wait.h"
#include "rendezvous/server_connection.h"

namespace pycomm::rendezvous {

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

}  // namespace pycomm::rendezvous
