// The messages of a handshake, without a socket: the two ends of a new connection prove that they
// hold the run's key and belong to the same group, before either trusts any other byte. A refusal
// has a reason as text. This is not encryption: transport/encrypted.h provides that.
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

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "core/sha256.h"

namespace pycomm::transport {

enum class HandshakeRole : uint8_t { connector, listener };
enum class HandshakeStep : uint8_t { want_read, want_write, done, refused };

struct HandshakeParams {
  std::string context;  // the group's name and token; must be equal at both ends
  int rank = 0;         // this rank
  int expected = -1;    // the only rank that is accepted at the other end; -1: any
  // A digest of the data that must be equal at both ends, of one length at both; may be empty.
  std::string agreed{};
  std::function<bool(int peer)> wanted{};  // a listener's yes or no; empty: yes
  bool patient = false;  // an authenticated connector waits for the yes without a limit
};

struct Refusal {
  enum class Cause : uint8_t {
    none,          // not refused
    other,         // see `why`
    no_listener,   // nothing listens at the address
    disconnected,  // the other side closed the connection; an evicted rank sees only that
    declined,      // the listener replied no
    differs,       // key and context are equal at both ends, but `agreed` is not
  };
  Cause cause = Cause::none;
  std::string why{};
};

// The bytes that the proofs of one handshake cover, and the key that signs them.
class Transcript {
 public:
  // Throws InvalidArgument on an empty key.
  Transcript(std::string key, std::string context);

  // Adds the connector's greeting first, then the listener's answer without its proof.
  void add(std::string_view message) { messages_ += message; }
  // The proof of `signer`; only a connector's covers `agreed`.
  Digest proof_of(HandshakeRole signer, std::string_view agreed = {}) const;
  bool is_proven(std::string_view proof, HandshakeRole signer, std::string_view agreed = {}) const;
  // 32 bytes that both ends derive and never send.
  std::string session_secret() const;

 private:
  Digest keyed_digest(const std::string& label, std::string_view agreed) const;

  std::string key_, context_, messages_;
};

// A state machine. While step() is want_write or want_read: send or receive all of message(), then
// call advance().
class HandshakeProtocol {
 public:
  // Throws InvalidArgument on an empty key.
  HandshakeProtocol(HandshakeRole role, std::string key, HandshakeParams params);

  HandshakeStep step() const;
  std::string& message() { return message_; }
  void advance();
  // Ends the handshake, also for a reason outside of its messages.
  void refuse(Refusal::Cause cause, const std::string& why) { refusal_ = {cause, why}; }

  HandshakeRole role() const { return role_; }
  bool greeted() const { return stage_ > 0; }  // of a listener: the greeting is complete
  // A patient connector sent its proof: the listener may already have replied yes.
  bool awaits_yes() const;
  int peer() const { return peer_; }  // once its proof was verified; else -1
  const Refusal& refusal() const { return refusal_; }
  std::string session_secret() const { return transcript_.session_secret(); }  // after done

 private:
  bool is_sending() const;
  void answer_greeting();
  void check_listener();
  void check_connector();
  void check_reply();
  bool accept_peer(int rank, const std::string& did);
  void refuse_proof();
  void expect_bytes(size_t bytes) { message_.assign(bytes, '\0'); }

  HandshakeRole role_;
  HandshakeParams params_;
  Transcript transcript_;
  std::string message_;   // that is being sent or received
  int stage_ = 0;         // index of the message; the number of messages: all were exchanged
  int claimed_rank_ = 0;  // in the greeting that this listener received
  int peer_ = -1;
  Refusal refusal_;
};

}  // namespace pycomm::transport
