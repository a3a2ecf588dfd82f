// A rendezvous store that one rank serves over TCP; its clients need the run's key.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/socket.h"
#include "rendezvous/store.h"
#include "rendezvous/store_frame.h"

namespace pycomm::rendezvous {

class StoreServer;

struct StoreHooks {
  std::function<void(const std::string&)> log{};  // receives a line for each failed attempt
  // Called at least every 100 ms while a call waits. Once it returns true, it must stay so, and the
  // call throws GroupBroken.
  std::function<bool()> interrupted{};
};

// Thread-safe. Concurrent calls use separate connections; after settle() no more are opened, and a
// call may wait 100 ms for another one. A key has 1 to 1024 bytes, a value at most 1 MiB (else
// InvalidArgument).
//
// A connection that is lost, or without an answer for some seconds, is replaced within the call's
// limit, and the request is sent again. The server applies no change twice.
class TcpStore final : public Store {
 public:
  // Serves the store in this process. An empty host: every interface; port 0: any free port. After
  // settle() that port is closed, and clients that lost their connection use another one, which the
  // kernel chose. The destructor stops the server, and waiting clients get PeerLost. Throws
  // InvalidArgument: address in use or unknown, empty key.
  static std::unique_ptr<TcpStore> serve(const std::string& host, uint16_t port,
                                         const std::string& key);

  // Connects to the server with the same key; retries with pauses that double up to a second. The
  // hooks are called on the calling threads. Throws Timeout with the last reason.
  static std::unique_ptr<TcpStore> connect(const std::string& host, uint16_t port,
                                           const std::string& key, const Deadline& deadline,
                                           StoreHooks hooks = {});

  ~TcpStore() override;

  // All throw PeerLost if the server's process ended, Timeout if it cannot be reached within the
  // limit, InternalError if its reply is invalid.
  void set(const std::string& key, const std::string& value,
           const Deadline& deadline = store_limit()) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t amount,
              const Deadline& deadline = store_limit()) override;
  std::optional<std::string> remove(const std::string& key,
                                    const Deadline& deadline = store_limit()) override;
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline = store_limit()) override;
  // Call it on both ends: the server closes its public port, a client opens no more connections.
  void settle() override;

  uint16_t port() const { return port_; }

 private:
  struct ServerConnection {
    os::Fd fd;
    std::string in;             // a partial reply
    size_t unread_replies = 0;  // to requests sent so far
  };

  struct Failure {
    std::string why{};
    bool no_server = false;  // nothing listens there, or another server does
  };

  TcpStore(std::string host, uint16_t port, std::string key, StoreHooks hooks);
  bool wait(int fd, short events, const Deadline& deadline) const;
  bool interrupted() const { return hooks_.interrupted && hooks_.interrupted(); }
  void check_interrupted() const;
  os::Fd attempt(const os::Address& address, const Deadline& deadline, Failure& failure);
  os::Fd attempt_all(const Deadline& deadline, Failure& failure);
  os::Fd greet(os::Fd fd, const Deadline& deadline, Failure& failure);
  os::Fd open(const Deadline& deadline);
  std::optional<store_frame::Reply> exchange(ServerConnection& connection,
                                             const store_frame::Request& request,
                                             const Deadline& answer_by, bool& usable) const;
  std::optional<ServerConnection> take(const Deadline& deadline);
  void give_back(std::optional<ServerConnection> connection);
  std::optional<store_frame::Reply> ask(const store_frame::Request& request,
                                        const Deadline& deadline,
                                        std::chrono::milliseconds slack = {});
  store_frame::Reply change(store_frame::Request request, const Deadline& deadline);
  void finish(uint64_t number);
  bool send_all(int fd, const std::string& bytes, const Deadline& deadline) const;
  bool receive(ServerConnection& connection, const Deadline& deadline,
               store_frame::Reply& reply) const;
  std::string name() const;

  std::string host_;
  uint16_t port_;
  std::string key_;
  StoreHooks hooks_;
  std::unique_ptr<StoreServer> server_;  // if this process serves
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<ServerConnection> idle_;  // connections that no call uses
  size_t in_use_ = 0;                   // number of connections in use
  bool settled_ = false;
  bool was_there_ = false;          // a connection succeeded: a refused one now means its end
  std::string server_name_;         // its random name, set by the first connection
  uint16_t reconnect_port_ = 0;     // its port for clients that lost a connection
  uint64_t client_;                 // random number that identifies this client
  uint64_t next_number_ = 1;        // of the next change
  std::set<uint64_t> in_flight_{};  // numbers of the changes that a call waits for
};

}  // namespace pycomm::rendezvous
