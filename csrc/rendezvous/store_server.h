// The serving end of the TCP store: one thread that polls a listener and its clients. Made and
// owned by TcpStore::serve().
//
// Strangers cost little: a connection must pass the handshake within its limit, at most
// max_pending() are in it at a time, and when more come, or descriptors run out, one of them gives
// way (transport/admission.h). Once the run is complete the listener is closed, and the clients
// that came stay.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <random>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"
#include "transport/admission.h"
#include "transport/handshake.h"

namespace pycomm {

class StoreServer {
 public:
  static constexpr size_t kMaxStoreBytes = size_t{1} << 28;

  StoreServer(const Address& address, std::string key,
              std::chrono::nanoseconds handshake_limit = kHandshakeLimit);
  // Ends the thread and closes the listener and every connection.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  uint16_t port() const { return port_; }
  // The keys; safe from any thread, but tell the thread of a new one with wake().
  LocalStore& keys() { return keys_; }
  void wake();
  // Takes in nobody any more; nothing listens when it returns.
  void close_door();

 private:
  enum class Door : uint8_t { open, closing, closed };

  // First a stranger in its handshake, then a client that asks, perhaps waits, and is answered.
  struct Client;

  void run();
  void lock_up();
  Clock::time_point next_deadline() const;
  void accept_some();
  bool evict();
  bool advance(Client& client, short events);
  bool receive(Client& client);
  bool answer(Client& client);
  store_frame::Reply change(const store_frame::Request& request);
  bool send(Client& client);
  bool shake_hands(Client& client, short events);

  std::string key_;
  std::chrono::nanoseconds handshake_limit_;
  Fd listener_, wake_;
  uint16_t port_;
  LocalStore keys_;
  std::list<Client> clients_;  // in the order of their coming; the thread's alone
  size_t max_strangers_ = max_pending();
  std::minstd_rand random_ = eviction_random();
  Clock::time_point accept_again_{};  // the listener is left alone until then
  std::atomic<bool> stopping_{false};
  std::atomic<Door> door_{Door::open};
  pid_t born_;          // the process whose thread it is: a forked child has none
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace pycomm
