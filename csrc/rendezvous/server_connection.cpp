// See server_connection.h.
#include "rendezvous/server_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/errors.h"
#include "os/socket.h"

namespace pycomm::rendezvous {

std::optional<store_frame::Reply> ServerConnection::exchange(const store_frame::Request& request,
                                                             const Deadline& answer_by) {
  usable_ = send_all(store_frame::encode(request), answer_by);
  if (!usable_) return std::nullopt;
  ++unread_replies_;
  store_frame::Reply answer;
  while (unread_replies_ > 0 && receive(answer_by, answer)) --unread_replies_;
  if (unread_replies_ > 0) return std::nullopt;
  return answer;
}

// This and receive() return false if wait() does.
bool ServerConnection::send_all(const std::string& bytes, const Deadline& deadline) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t got = ::send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    const int error = errno;
    if (got >= 0)
      sent += static_cast<size_t>(got);
    else if (error == EAGAIN && !wait_->wait(fd_.get(), POLLOUT, deadline))
      return false;
    else if (error != EAGAIN && error != EINTR)
      throw PeerLost(os::error_text(error));
  }
  return true;
}

bool ServerConnection::receive(const Deadline& deadline, store_frame::Reply& reply) {
  while (true) {
    auto parsed = store_frame::parse_reply(in_);
    if (parsed.parse == store_frame::Parse::broken)
      throw InternalError("invalid reply from the store at " + wait_->server() +
                          ": not a reply frame");
    if (parsed.parse == store_frame::Parse::complete) {
      reply = std::move(parsed.frame);
      in_.clear();
      return true;
    }
    const size_t had = in_.size();
    in_.resize(parsed.needed);
    const ssize_t got = ::recv(fd_.get(), in_.data() + had, in_.size() - had, 0);
    const int error = errno;
    in_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) throw PeerLost("it closed the connection");
    if (got > 0 || error == EINTR) continue;
    if (error != EAGAIN) throw PeerLost(os::error_text(error));
    if (!wait_->wait(fd_.get(), POLLIN, deadline)) return false;
  }
}

}  // namespace pycomm::rendezvous
