// Mutual authentication of the two ends of a new connection: the messages of handshake_protocol.h
// on a socket, within a limit.
#pragma once

#include <chrono>
#include <string>

#include "core/deadline.h"
#include "os/fd.h"
#include "transport/handshake_protocol.h"

namespace pycomm::transport {

inline constexpr std::chrono::seconds kHandshakeLimit{5};

// A state machine that never blocks. Poll fd() for the event that advance() returned, and call it
// again then, and also when `limit` has passed: it then refuses, unless `patient` applies.
class Handshake {
 public:
  using Role = HandshakeRole;
  using Step = HandshakeStep;

  // Owns the non-blocking stream socket, which a connector may still be connecting. Throws
  // InvalidArgument on an empty key.
  Handshake(os::Fd fd, Role role, std::string key, HandshakeParams params,
            std::chrono::nanoseconds limit = kHandshakeLimit);

  // Closes the socket when it refuses. Never reads past the last byte of the handshake.
  Step advance();
  int fd() const { return fd_.get(); }  // -1 once refused or released
  const Deadline& deadline() const { return deadline_; }
  os::Fd release();                              // after done
  int peer() const { return protocol_.peer(); }  // after done or differs(): the authenticated rank
  // After done: 32 bytes that both ends derive from the key and the whole handshake, unique to this
  // connection. They are never sent.
  std::string session_secret() const;
  // After refused.
  const std::string& why() const { return protocol_.refusal().why; }
  bool declined() const { return refused_by(Refusal::Cause::declined); }
  bool differs() const { return refused_by(Refusal::Cause::differs); }
  bool has_no_listener() const { return refused_by(Refusal::Cause::no_listener); }
  bool was_disconnected() const { return refused_by(Refusal::Cause::disconnected); }
  bool greeted() const { return protocol_.greeted(); }  // of a listener: the greeting is complete
  bool connected() const { return connected_; }  // of a connector: the connection was accepted

 private:
  bool refused_by(Refusal::Cause cause) const { return protocol_.refusal().cause == cause; }
  bool is_connecting() const { return protocol_.role() == Role::connector && !connected_; }
  bool finish_connecting();
  bool transfer();

  os::Fd fd_;
  HandshakeProtocol protocol_;
  Deadline deadline_;
  size_t moved_ = 0;  // bytes of the protocol's message so far
  bool connected_ = false;
};

}  // namespace pycomm::transport
