// The client's end of one connection of the TCP store, after the handshake.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "os/fd.h"
#include "rendezvous/client_wait.h"
#include "rendezvous/store_frame.h"

namespace pycomm::rendezvous {

// Used by one thread at a time.
class ServerConnection {
 public:
  ServerConnection(os::Fd fd, const ClientWait& wait) : fd_(std::move(fd)), wait_(&wait) {}

  // The reply; nothing at the deadline or after an interruption. A reply to an earlier request, if
  // it arrives late, is discarded. Throws PeerLost if the connection was closed, InternalError if
  // the reply is invalid.
  std::optional<store_frame::Reply> exchange(const store_frame::Request& request,
                                             const Deadline& answer_by);
  // False after exchange() sent a part of a request.
  bool is_usable() const { return usable_; }

 private:
  bool send_all(const std::string& bytes, const Deadline& deadline);
  bool receive(const Deadline& deadline, store_frame::Reply& reply);

  os::Fd fd_;
  const ClientWait* wait_;
  std::string in_;             // a partial reply
  size_t unread_replies_ = 0;  // to requests sent so far
  bool usable_ = true;
};

}  // namespace pycomm::rendezvous
