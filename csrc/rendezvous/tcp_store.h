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
class TcpStore final : public Store {
 public:
  // This process serves, and the object is a store of its own server. An empty host: every
  // interface; port 0: any that is free. Nothing listens any more after settle() or the destructor,
  // and clients that wait at the destructor get PeerLost. Throws InvalidArgument: address taken or
  // unknown, empty key.
  static std::unique_ptr<TcpStore> serve(const std::string& host, uint16_t port,
                                         const std::string& key);

  // Waits until a server is there that holds the same key, trying again and again with longer and
  // longer pauses, up to a second. The hooks are called on the threads that call. Throws Timeout
  // with the last reason.
  static std::unique_ptr<TcpStore> connect(const std::string& host, uint16_t port,
                                           const std::string& key, const Deadline& deadline,
                                           StoreHooks hooks = {});

  ~TcpStore() override;

  // All throw PeerLost when the server goes away, InternalError when it speaks nonsense.
  void set(const std::string& key, const std::string& value,
           const Deadline& deadline = store_limit()) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t amount,
              const Deadline& deadline = store_limit()) override;
  std::optional<std::string> remove(const std::string& key,
                                    const Deadline& deadline = store_limit()) override;
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline = store_limit()) override;
  // Each end calls it: the server closes its door, the clients open no more connections.
  void settle() override;

  uint16_t port() const { return port_; }

 private:
  // A connection. `owed`: replies to come that nobody waits for any more.
  struct Line {
    Fd fd;
    std::string in;  // a reply in part
    size_t owed = 0;
  };

  struct Failure {
    std::string why{};
    bool nobody_listens = false;
  };

  TcpStore(std::string host, uint16_t port, std::string key, StoreHooks hooks);
  bool wait(int fd, short events, const Deadline& deadline) const;
  bool interrupted() const { return hooks_.interrupted && hooks_.interrupted(); }
  void heed_interruption() const;
  Fd attempt(const Address& address, const Deadline& deadline, Failure& failure) const;
  Fd open(const Deadline& deadline) const;
  std::optional<Line> take(const Deadline& deadline);
  void give_back(std::optional<Line> line);
  std::optional<store_frame::Reply> ask(const store_frame::Request& request,
                                        const Deadline& deadline,
                                        std::chrono::milliseconds slack = {});
  store_frame::Reply change(const store_frame::Request& request, const Deadline& deadline);
  bool send_all(int fd, const std::string& bytes, const Deadline& deadline) const;
  bool receive(Line& line, const Deadline& deadline, store_frame::Reply& reply) const;
  std::string name() const;

  std::string host_;
  uint16_t port_;
  std::string key_;
  StoreHooks hooks_;
  std::unique_ptr<StoreServer> server_;  // where this process serves
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<Line> idle_;  // connections that no call uses now
  size_t in_use_ = 0;       // and how many are used
  bool settled_ = false;
  bool was_there_ = false;  // the server: if nobody listens there now, it has gone for good
};

}  // namespace pycomm
