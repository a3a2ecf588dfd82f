// The server of the TCP store: one thread that polls two listeners and its clients.
//
// It listens on two ports. The public one is closed once all ranks are connected, so that another
// run can use it. The other one, chosen by the kernel and sent in the reply to `hello`, stays open,
// so that a client can reconnect after it lost its connection.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "os/fd.h"
#include "os/socket.h"
#include "os/wake_event.h"
#include "rendezvous/connected_clients.h"
#include "rendezvous/local_store.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {

class StoreServer {
 public:
  StoreServer(const os::Address& address, std::string key,
              std::chrono::nanoseconds handshake_limit = transport::kHandshakeLimit);
  // Ends the thread and closes the listeners and every connection.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  uint16_t port() const { return port_; }
  // The keys; thread-safe, but call wake() after setting one.
  LocalStore& keys() { return handler_.keys(); }
  void wake() const { wake_.notify(); }
  // The public port is closed when it returns; clients reconnect on the other one.
  void stop_listening();

 private:
  enum class ListenerState : uint8_t { open, closing, closed };

  void run();
  void run_once();
  void shut_down();

  os::Fd listener_, reconnect_listener_;
  os::WakeEvent wake_;
  uint16_t port_;
  RequestHandler handler_;
  ConnectedClients clients_;  // used only by the thread
  std::atomic<bool> stopping_{false};
  std::atomic<ListenerState> listener_state_{ListenerState::open};
  pid_t owner_;         // the process that has the thread: a forked child does not
  std::thread thread_;  // last: it uses all members above
};

}  // namespace pycomm::rendezvous
