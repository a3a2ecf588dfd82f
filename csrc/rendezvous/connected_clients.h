// The connections of the TCP store's server, from accept() on.
//
// Unauthenticated clients cost little: a connection must pass the handshake within its limit, and
// at most max_pending() are in it at a time. When more arrive, or descriptors run out, one of them
// is evicted (transport/admission.h).
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/wake_event.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"
#include "transport/admission.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {

// The keys, and the effect of the clients' requests on them.
class RequestHandler {
 public:
  // `hello`: the reply to that request. `changed` is notified of each change: a client may wait for
  // it.
  RequestHandler(std::string hello, const os::WakeEvent& changed);

  LocalStore& keys() { return keys_; }  // thread-safe
  // Used by one thread. Nothing: a get whose key is not set.
  std::optional<store_frame::Reply> handle(const store_frame::Request& request);

 private:
  // To changes of one client: the replies that it may still need, by number.
  struct ClientReplies {
    uint64_t oldest = 0;
    std::map<uint64_t, store_frame::Reply> replies;
  };

  store_frame::Reply change_once(const store_frame::Request& request);
  store_frame::Reply change(const store_frame::Request& request);
  store_frame::Reply add(const store_frame::Request& request);

  std::string hello_;
  const os::WakeEvent& changed_;
  LocalStore keys_;
  std::map<uint64_t, ClientReplies> replies_;  // by client
};

// One connection: first in its handshake, then an authenticated client with at most one request at
// a time. Nothing here blocks.
class ClientConnection {
 public:
  // Upper limit of a wait, so that nothing overflows.
  static constexpr std::chrono::hours kLongestWait{1};

  // `source`: source_of() the connection.
  ClientConnection(transport::Handshake handshake, uint64_t source)
      : source_(source), handshake_(std::move(handshake)) {}

  bool is_pending() const { return handshake_.has_value(); }  // not authenticated
  std::optional<transport::Pending> pending() const {
    if (!handshake_) return std::nullopt;
    return transport::Pending{source_, handshake_->greeted()};
  }
  // The event that it waits for, and the end of that wait.
  pollfd awaited() const;
  Clock::time_point deadline() const;
  // Call it after a poll, with the events of awaited(). False: drop this connection.
  bool advance(short events, RequestHandler& handler);

 private:
  bool advance_handshake(short events);
  bool receive(RequestHandler& handler);
  bool answer(RequestHandler& handler);
  bool send();

  uint64_t source_;
  std::optional<transport::Handshake> handshake_;  // empty after it completed
  bool handshake_sends_ = false;
  os::Fd socket_;                                // after the handshake
  std::string in_, out_;                         // a partial request, a reply
  size_t sent_ = 0;                              // bytes of the reply
  std::optional<store_frame::Request> waiting_;  // a get whose key is not set yet
  Clock::time_point wait_end_{};
};

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
