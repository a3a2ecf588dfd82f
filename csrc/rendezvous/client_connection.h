// The server's end of one connection of the TCP store: first in its handshake, then an
// authenticated client with at most one request at a time. Nothing here blocks.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "os/fd.h"
#include "rendezvous/request_handler.h"
#include "rendezvous/store_frame.h"
#include "transport/admission.h"
#include "transport/handshake.h"

namespace pycomm::rendezvous {

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

}  // namespace pycomm::rendezvous
