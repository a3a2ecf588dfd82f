// A store that one rank serves over TCP and the others reach with the run's key.
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

namespace pycomm {

class StoreServer;

struct StoreHooks {
  std::function<void(const std::string&)> log{};  // a line for each attempt that failed
  // Asked at least every 100 ms while a call waits; once true it stays so, and the call throws
  // GroupBroken.
  std::function<bool()> interrupted{};
};

// From any thread; calls of several threads do not wait for each other, but after settle() they
// share the connections that are there, so that one may wait 100 ms for another. A key has 1 to
// 1024 bytes, a value at most 1 MiB (InvalidArgument).
//
// A connection that is lost, or on which no answer comes for some seconds, is replaced by a new one
// within the call's limit, and the request is sent again: the server applies no change twice.
class TcpStore final : public Store {
 public:
  // This process serves, and the object is a store of its own server. An empty host: every
  // interface; port 0: any that is free. After settle() that port is closed, and the server listens
  // at another one, which the kernel chose, for clients that lost their connection. After the
  // destructor nothing listens, and clients that wait get PeerLost. Throws InvalidArgument: address
  // taken or unknown, empty key.
  static std::unique_ptr<TcpStore> serve(const std::string& host, uint16_t port,
                                         const std::string& key);

  // Waits until a server is there that holds the same key, trying again and again with longer and
  // longer pauses, up to a second. The hooks are called on the threads that call. Throws Timeout
  // with the last reason.
  static std::unique_ptr<TcpStore> connect(const std::string& host, uint16_t port,
                                           const std::string& key, const Deadline& deadline,
                                           StoreHooks hooks = {});

  ~TcpStore() override;

  // All throw PeerLost when the server's process has ended, Timeout where it cannot be reached
  // within the limit, InternalError when its reply is invalid.
  void set(const std::string& key, const std::string& value,
           const Deadline& deadline = store_limit()) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t amount,
              const Deadline& deadline = store_limit()) override;
  std::optional<std::string> remove(const std::string& key,
                                    const Deadline& deadline = store_limit()) override;
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline = store_limit()) override;
  // Each end calls it: the server closes its public port, a client uses one connection.
  void settle() override;

  uint16_t port() const { return port_; }

 private:
  // A connection.
  struct ServerConnection {
    Fd fd;
    std::string in;             // a reply in part
    size_t unread_replies = 0;  // to requests sent so far
  };

  struct Failure {
    std::string why{};
    bool nobody_listens = false;
  };

  TcpStore(std::string host, uint16_t port, std::string key, StoreHooks hooks);
  bool wait(int fd, short events, const Deadline& deadline) const;
  bool interrupted() const { return hooks_.interrupted && hooks_.interrupted(); }
  void heed_interruption() const;
  Fd attempt(const Address& address, const Deadline& deadline, Failure& failure);
  Fd attempt_all(const Deadline& deadline, Failure& failure);
  Fd greet(Fd fd, const Deadline& deadline, Failure& failure);
  Fd open(const Deadline& deadline);
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
  std::unique_ptr<StoreServer> server_;  // where this process serves
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<ServerConnection> idle_;  // connections that no call uses now
  size_t in_use_ = 0;                   // and how many are used
  bool settled_ = false;
  bool was_there_ = false;          // a connection was made: a refused one now means its end
  std::string server_name_;         // its random name, from the first connection on
  uint16_t reconnect_port_ = 0;     // where it listens for clients that lost a connection
  uint64_t client_;                 // this client's random number
  uint64_t next_number_ = 1;        // of the next change
  std::set<uint64_t> in_flight_{};  // numbers of the changes that a call waits for
};

}  // namespace pycomm
