// The server of the TCP store: one thread that polls two listeners and its clients.
//
// Unauthenticated clients cost little: a connection must pass the handshake within its limit, and
// at most max_pending() are in it at a time. When more arrive, or descriptors run out, one of them
// is evicted (transport/admission.h).
//
// It listens on two ports. The public one is closed once all ranks are connected, so that another
// run can use it. The other one, chosen by the kernel and sent in the reply to `hello`, stays open,
// so that a client can reconnect after it lost its connection.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/socket.h"
#include "os/wake_event.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"
#include "transport/admission.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {

class StoreServer {
 public:
  static constexpr size_t kMaxStoreBytes = size_t{1} << 28;

  StoreServer(const os::Address& address, std::string key,
              std::chrono::nanoseconds handshake_limit = transport::kHandshakeLimit);
  // Ends the thread and closes the listeners and every connection.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  uint16_t port() const { return port_; }
  // The keys; thread-safe, but call wake() after setting one.
  LocalStore& keys() { return keys_; }
  void wake() const { wake_.notify(); }
  // The public port is closed when it returns; clients reconnect on the other one.
  void stop_listening();

 private:
  enum class ListenerState : uint8_t { open, closing, closed };

  // First a pending connection in its handshake, then an authenticated client.
  struct Client;

  void run();
  void shut_down();
  Clock::time_point next_deadline() const;
  void accept_some(os::Fd& listener);
  bool evict();
  bool advance(Client& client, short events);
  bool receive(Client& client);
  bool answer(Client& client);
  store_frame::Reply change_once(const store_frame::Request& request);
  store_frame::Reply change(const store_frame::Request& request);
  bool send(Client& client);
  bool advance_handshake(Client& client, short events);

  std::string key_;
  std::chrono::nanoseconds handshake_limit_;
  os::Fd listener_, reconnect_listener_;
  os::WakeEvent wake_;
  uint16_t port_;
  std::string hello_;  // the reply to `hello`: the server's random name, a blank, the port
  LocalStore keys_;
  std::list<Client> clients_;  // in order of arrival; used only by the thread
  // By client: the replies that it may still need.
  struct ClientReplies {
    uint64_t oldest = 0;
    std::map<uint64_t, store_frame::Reply> replies;
  };
  std::map<uint64_t, ClientReplies> replies_;
  size_t max_pending_ = transport::max_pending();
  std::minstd_rand random_ = transport::eviction_random();
  Clock::time_point accept_again_{};  // no connections are accepted until then
  std::atomic<bool> stopping_{false};
  std::atomic<ListenerState> listener_state_{ListenerState::open};
  pid_t born_;          // the process that has the thread: a forked child does not
  std::thread thread_;  // last: it uses all members above
};

}  // namespace pycomm::rendezvous
