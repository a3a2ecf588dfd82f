// Mutual authentication of the two ends of a new connection: each proves that it holds the run's
// key and belongs to the same group, before either trusts any other byte. A refusal has a reason as
// text. This is not encryption: transport/encrypted.h provides that.
//
//   connector                                    listener
//   nonce C, my rank                      ->
//                                         <-     nonce L, my rank, HMAC("listener", all of it)
//   agreed, HMAC("connector", all of it)  ->
//                                         <-     yes, no, or different
//
// "All of it" is the context, both nonces, both ranks and `agreed`. All sizes are fixed. The two
// labels prevent the reflection of a proof, the nonces its replay. The ranks are used only after
// the proof that covers them is verified. "No" declines the connection of an authenticated rank: if
// two ranks connect to each other, one of the two connections is dropped. After a "yes" both ends
// use this connection. "Different" means that the two ranks have different descriptions of the
// group (HandshakeParams::agreed); both ends then report that.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "core/deadline.h"
#include "core/sha256.h"
#include "os/fd.h"

namespace pycomm::transport {

struct HandshakeParams {
  std::string context;  // the group's name and token; must be equal at both ends
  int rank = 0;         // this rank
  int expected = -1;    // the only rank that is accepted at the other end; -1: any
  // A digest of the data that must be equal at both ends, of one length at both; may be empty.
  std::string agreed{};
  std::function<bool(int peer)> wanted{};  // a listener's yes or no; empty: yes
  bool patient = false;  // an authenticated connector waits for the yes without a limit
};

inline constexpr std::chrono::seconds kHandshakeLimit{5};

// A state machine that never blocks. Poll fd() for the event that advance() returned, and call it
// again then, and also when `limit` has passed: it then refuses, unless `patient` applies.
class Handshake {
 public:
  enum class Role : uint8_t { connector, listener };
  enum class Step : uint8_t { want_read, want_write, done, refused };

  // Owns the non-blocking stream socket, which a connector may still be connecting. Throws
  // InvalidArgument on an empty key.
  Handshake(os::Fd fd, Role role, std::string key, HandshakeParams params,
            std::chrono::nanoseconds limit = kHandshakeLimit);

  // Closes the socket when it refuses. Never reads past the last byte of the handshake.
  Step advance();
  int fd() const { return fd_.get(); }  // -1 once refused or released
  const Deadline& deadline() const { return deadline_; }
  os::Fd release();                   // after done
  int peer() const { return peer_; }  // after done or differs(): the authenticated rank
  // After done: 32 bytes that both ends derive from the key and the whole handshake, unique to this
  // connection. They are never sent.
  std::string session_secret() const;
  const std::string& why() const { return why_; }  // after refused
  bool declined() const { return declined_; }      // after refused: the listener replied no
  // After refused: key and context are equal at both ends, but `agreed` is not.
  bool differs() const { return differs_; }
  bool has_no_listener() const { return no_listener_; }  // after refused: there is no listener
  // After refused: the other side closed the connection; an evicted rank sees only that.
  bool was_disconnected() const { return disconnected_; }
  bool greeted() const { return stage_ > 0; }    // of a listener: the greeting is complete
  bool connected() const { return connected_; }  // of a connector: the connection was accepted

 private:
  bool is_sending() const;
  bool awaits_yes() const;
  bool transfer();
  void next();
  void answer_greeting();
  void check_listener();
  void check_connector();
  bool is_proven(std::string_view proof, Role signer, std::string_view agreed);
  Digest proof_of(Role signer, std::string_view agreed) const;
  Digest keyed_digest(const std::string& label, std::string_view agreed) const;
  void expect_bytes(size_t bytes);
  void refuse(const std::string& why);

  os::Fd fd_;
  Role role_;
  std::string key_;
  HandshakeParams params_;
  Deadline deadline_;
  Step state_ = Step::want_write;
  std::string buffer_;  // the message that is being sent or received
  size_t moved_ = 0;    // its bytes so far
  int stage_ = 0;       // 0 to 3: index of the message
  bool connected_ = false, declined_ = false, differs_ = false, no_listener_ = false,
       disconnected_ = false;
  std::string greeting_;  // the connector's first message
  std::string answer_;    // the listener's answer, without its proof
  int peer_ = -1;
  std::string why_;
};

}  // namespace pycomm::transport
