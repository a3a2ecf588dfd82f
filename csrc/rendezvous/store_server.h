// The serving end of the TCP store: one thread that polls a listener and its clients. Made and
// owned by TcpStore::serve().
//
// Strangers cost little: a connection must pass the handshake within its limit, at most
// kMaxStrangers are in it at a time, and when more come, or descriptors run out, the oldest gives
// way.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"
#include "transport/handshake.h"

namespace pycomm {

class StoreServer {
 public:
  static constexpr size_t kMaxStrangers = 64;
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

 private:
  // First a stranger in its handshake, then a client that asks, perhaps waits, and is answered.
  struct Client;

  void run();
  Clock::time_point next_deadline() const;
  void accept_one();
  bool drop_oldest_stranger();
  bool advance(Client& client, short events);
  bool receive(Client& client);
  bool answer(Client& client);
  bool send(Client& client);
  bool shake_hands(Client& client, short events);

  std::string key_;
  std::chrono::nanoseconds handshake_limit_;
  Fd listener_, wake_;
  uint16_t port_;
  LocalStore keys_;
  std::list<Client> clients_;         // in the order of their coming; the thread's alone
  Clock::time_point accept_again_{};  // the listener is left alone until then
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace pycomm
