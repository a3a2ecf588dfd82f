// See handshake.h.
#include "transport/handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"

namespace pycomm::transport {

Handshake::Handshake(os::Fd fd, Role role, std::string key, HandshakeParams params,
                     std::chrono::nanoseconds limit)
    : fd_(std::move(fd)), protocol_(role, std::move(key), std::move(params)), deadline_(limit) {}

Handshake::Step Handshake::advance() {
  while (protocol_.step() == Step::want_read || protocol_.step() == Step::want_write) {
    // The listener may already have replied yes: closing the connection would look like a failure.
    if (deadline_.expired() && !protocol_.awaits_yes()) {
      protocol_.refuse(Refusal::Cause::other,
                       is_connecting()
                           ? "nothing answered within the limit"
                           : "the other side did not finish the handshake within its limit");
    } else if (transfer()) {
      moved_ = 0;
      protocol_.advance();
    } else {
      break;
    }
  }
  if (protocol_.step() == Step::refused) fd_.reset();
  return protocol_.step();
}

os::Fd Handshake::release() {
  check(protocol_.step() == Step::done, "a connection was released before its handshake was done");
  return std::move(fd_);
}

std::string Handshake::session_secret() const {
  check(protocol_.step() == Step::done, "a session began before its handshake was done");
  return protocol_.session_secret();
}

// True when the connection is established.
bool Handshake::finish_connecting() {
  const int error = os::connect_error(fd_.get());
  connected_ = error == 0;
  if (error != 0 && error != EINPROGRESS)
    protocol_.refuse(error == ECONNREFUSED ? Refusal::Cause::no_listener : Refusal::Cause::other,
                     os::error_text(error));
  return connected_;
}

// Sends or receives what the socket allows now; true when the message is complete.
bool Handshake::transfer() {
  if (is_connecting() && !finish_connecting()) return false;
  const bool sending = protocol_.step() == Step::want_write;
  std::string& message = protocol_.message();
  while (moved_ < message.size()) {
    char* at = message.data() + moved_;
    const size_t left = message.size() - moved_;
    const ssize_t got =
        sending ? ::send(fd_.get(), at, left, MSG_NOSIGNAL) : ::recv(fd_.get(), at, left, 0);
    if (got > 0) {
      moved_ += static_cast<size_t>(got);
    } else if (got == 0) {
      protocol_.refuse(Refusal::Cause::disconnected,
                       "the other side closed the connection during the handshake");
      return false;
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      const bool closed = errno == ECONNRESET || errno == EPIPE;
      protocol_.refuse(closed ? Refusal::Cause::disconnected : Refusal::Cause::other,
                       "the connection broke during the handshake: " + os::error_text(errno));
      return false;
    }
  }
  return true;
}

}  // namespace pycomm::transport
