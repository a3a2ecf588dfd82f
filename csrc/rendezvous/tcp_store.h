// A rendezvous store that one rank serves over TCP; its clients need the run's key.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/deadline.h"
#include "rendezvous/store.h"

namespace pycomm::rendezvous {

struct StoreHooks {
  std::function<void(const std::string&)> log{};  // receives a line for each failed attempt
  // Called at least every 100 ms while a call waits. Once it returns true, it must stay so, and the
  // call throws GroupBroken.
  std::function<bool()> interrupted{};
};

// One end of the store: of the process that serves it, or of a client. Thread-safe. Concurrent
// calls use separate connections; after all_ranks_connected() no more are opened, and a call may
// wait 100 ms for another one. A key has 1 to 1024 bytes, a value at most 1 MiB (else
// InvalidArgument).
//
// A connection that is lost, or without an answer for some seconds, is replaced within the call's
// limit, and the request is sent again. The server applies no change twice.
//
// All calls throw PeerLost if the server's process ended, Timeout if it cannot be reached within
// the limit, InternalError if its reply is invalid.
class TcpStore : public Store {
 public:
  // Serves the store in this process. An empty host: every interface; port 0: any free port. After
  // all_ranks_connected() that port is closed, and clients that lost their connection use another
  // one, which the kernel chose. The destructor stops the server, and waiting clients get PeerLost.
  // Throws InvalidArgument: address in use or unknown, empty key.
  static std::unique_ptr<TcpStore> serve(const std::string& host, uint16_t port,
                                         const std::string& key);

  // Connects to the server with the same key; retries with pauses that double up to a second. The
  // hooks are called on the calling threads. Throws Timeout with the last reason.
  static std::unique_ptr<TcpStore> connect(const std::string& host, uint16_t port,
                                           const std::string& key, const Deadline& deadline,
                                           StoreHooks hooks = {});

  // Call it on both ends: the server closes its public port, a client opens no more connections.
  void all_ranks_connected() override = 0;

  uint16_t port() const { return port_; }

 protected:
  explicit TcpStore(uint16_t port) : port_(port) {}
  // Throws InvalidArgument.
  static void check_sizes(const std::string& key, const std::string& value);

 private:
  uint16_t port_;
};

}  // namespace pycomm::rendezvous
