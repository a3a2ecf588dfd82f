// The connections of one client of the TCP store. Concurrent calls use separate ones.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "core/deadline.h"
#include "rendezvous/client_wait.h"
#include "rendezvous/server_connection.h"
#include "rendezvous/server_dialer.h"

namespace pycomm::rendezvous {

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
