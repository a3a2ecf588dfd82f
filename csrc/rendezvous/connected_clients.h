// The connections of the TCP store's server, from accept() on.
//
// Unauthenticated clients cost little: a connection must pass the handshake within its limit, and
// at most max_pending() are in it at a time. When more arrive, or descriptors run out, one of them
// is evicted (transport/admission.h).
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "rendezvous/client_connection.h"
#include "rendezvous/request_handler.h"
#include "transport/admission.h"

namespace pycomm::rendezvous {

// Used by one thread.
class ConnectedClients {
 public:
  // The handler answers the requests. Throws InvalidArgument on an empty key.
  ConnectedClients(RequestHandler& handler, std::string key,
                   std::chrono::nanoseconds handshake_limit);

  // False while no descriptor is left: do not poll the listeners then.
  bool can_accept() const { return Clock::now() >= accept_again_; }
  void accept_from(const os::Fd& listener);
  // Appends the events that the connections wait for.
  void append_awaited(std::vector<pollfd>& polled) const;
  // The time at which advance() must be called without an event.
  Clock::time_point next_deadline() const;
  // Call it after each poll, with what append_awaited() appended.
  void advance(std::span<const pollfd> polled);
  void drop_pending();
  void clear() { clients_.clear(); }

 private:
  bool evict() { return admission_.evict(clients_, std::mem_fn(&ClientConnection::pending)); }

  RequestHandler& handler_;
  std::string key_;
  std::chrono::nanoseconds handshake_limit_;
  std::list<ClientConnection> clients_;  // in order of arrival
  transport::Admission admission_;
  Clock::time_point accept_again_{};
};

}  // namespace pycomm::rendezvous
