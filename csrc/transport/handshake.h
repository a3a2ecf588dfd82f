// How two ends of a fresh connection prove to each other that they hold the run's key and belong to
// the same group, before either believes a byte of the other. Who may not is refused with a
// sentence. Not encryption: what follows is in the clear unless transport/encrypted.h is put on
// top. Called by the transports' set-up and the store.
//
//   connector                                    listener
//   nonce C, my rank                      ->
//                                         <-     nonce L, my rank, HMAC("listener", all of it)
//   agreed, HMAC("connector", all of it)  ->
//                                         <-     yes, no, or different
//
// "All of it" is the context, both nonces, both ranks and `agreed`. Fixed sizes; the two labels
// keep one end's proof from being sent back to it, the nonces keep an old proof from being used
// again; the ranks are looked at only after the proof that covers them. "No" tells a rank that has
// proved who it is that its connection is not wanted: of two that call each other one gives way.
// After a "yes" both ends hold the same connection. "Different" tells a rank of the group that the
// two do not know the same of it (HandshakeParams::agreed); both ends then report that.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "core/deadline.h"
#include "core/sha256.h"
#include "os/fd.h"

namespace pycomm {

struct HandshakeParams {
  std::string context;  // the group's name and token: both ends must hold the same
  int rank = 0;         // who I am
  int expected = -1;    // whom I call, or whom alone I let in; -1: anybody
  // A digest of what both ends must know alike, of one length at both; may be empty.
  std::string agreed{};
  std::function<bool(int peer)> wanted{};  // a listener's yes or no; empty: yes
  bool patient = false;  // a connector that has proved itself waits for the yes without a limit
};

inline constexpr std::chrono::seconds kHandshakeLimit{5};

// A state machine that never blocks: poll fd() for what advance() wants, and call it again then,
// and also when `limit` has passed: it then refuses, unless its claim is patient.
class Handshake {
 public:
  enum class Role : uint8_t { connector, listener };
  enum class Step : uint8_t { want_read, want_write, done, refused };

  // Owns the non-blocking stream socket, which a connector may still be connecting. Throws
  // InvalidArgument on an empty key.
  Handshake(Fd fd, Role role, std::string key, HandshakeParams params,
            std::chrono::nanoseconds limit = kHandshakeLimit);

  // Once refused, the socket is closed. Not one byte after the other's last is read.
  Step advance();
  int fd() const { return fd_.get(); }  // -1 once refused or released
  const Deadline& deadline() const { return deadline_; }
  Fd release();                       // after done
  int peer() const { return peer_; }  // after done or differs(): the rank that the other proved
  // After done: 32 bytes that both ends derive from the key and from all that they said, of use for
  // this connection alone. Neither end sends them.
  std::string session_secret() const;
  const std::string& why() const { return why_; }  // after refused
  bool declined() const { return declined_; }      // after refused: the listener said no
  // After refused: both ends hold the key and the context, but not the same `agreed`.
  bool differs() const { return differs_; }
  bool has_no_listener() const { return no_listener_; }  // after refused: there is no listener
  // After refused: the other side closed the connection, which is all that an evicted rank sees.
  bool was_disconnected() const { return disconnected_; }
  bool greeted() const { return stage_ > 0; }    // a listener's: the greeting is complete
  bool connected() const { return connected_; }  // a connector's call was taken

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

  Fd fd_;
  Role role_;
  std::string key_;
  HandshakeParams params_;
  Deadline deadline_;
  Step state_ = Step::want_write;
  std::string buffer_;  // the message that is being sent or received
  size_t moved_ = 0;    // of it so far
  int stage_ = 0;       // 0 to 3: which of the four messages
  bool connected_ = false, declined_ = false, differs_ = false, no_listener_ = false,
       disconnected_ = false;
  std::string greeting_;  // what the connector sent first
  std::string answer_;    // what the listener answered, without its proof
  int peer_ = -1;
  std::string why_;
};

}  // namespace pycomm
