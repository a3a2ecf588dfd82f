// See handshake_protocol.h.
#include "transport/handshake_protocol.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/errors.h"
#include "os/random.h"

namespace pycomm::transport {
namespace {

constexpr size_t kNonceBytes = 32, kRankBytes = 4, kProofBytes = 32;
constexpr size_t kGreetingBytes = kNonceBytes + kRankBytes;
constexpr size_t kAnswerBytes = kNonceBytes + kRankBytes;
constexpr int kMessages = 4;
constexpr char kYes = 'y', kNo = 'n', kDifferent = 'd';

std::string text_of(const std::array<uint8_t, 32>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string little_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

std::string nonce_and_rank(int rank) {
  return text_of(os::random_bytes()) + little_endian(static_cast<uint32_t>(rank));
}

// The rank behind the nonce of a greeting or an answer.
int rank_in(std::string_view message) {
  uint32_t value = 0;
  for (size_t i = 0; i < kRankBytes; ++i)
    value |= uint32_t{static_cast<uint8_t>(message[kNonceBytes + i])} << (8 * i);
  return static_cast<int>(value);
}

}  // namespace

Transcript::Transcript(std::string key, std::string context)
    : key_(std::move(key)), context_(std::move(context)) {
  if (key_.empty()) throw InvalidArgument("the key of a connection is empty");
}

Digest Transcript::proof_of(HandshakeRole signer, std::string_view agreed) const {
  return keyed_digest(
      signer == HandshakeRole::listener ? "pycomm 1 listener" : "pycomm 1 connector", agreed);
}

bool Transcript::is_proven(std::string_view proof, HandshakeRole signer,
                           std::string_view agreed) const {
  Digest got{};
  std::copy(proof.begin(), proof.end(), got.begin());
  return equal_in_constant_time(got, proof_of(signer, agreed));
}

std::string Transcript::session_secret() const {
  return text_of(keyed_digest("pycomm 1 session", {}));
}

Digest Transcript::keyed_digest(const std::string& label, std::string_view agreed) const {
  // The length precedes the context and everything else has a fixed size: different conversations
  // have different bytes.
  return hmac_sha256(key_, label + '\0' + little_endian(static_cast<uint32_t>(context_.size())) +
                               context_ + messages_ + std::string(agreed));
}

HandshakeProtocol::HandshakeProtocol(HandshakeRole role, std::string key, HandshakeParams params)
    : role_(role), params_(std::move(params)), transcript_(std::move(key), params_.context) {
  if (role_ == HandshakeRole::connector) {
    message_ = nonce_and_rank(params_.rank);
    transcript_.add(message_);
  } else {
    expect_bytes(kGreetingBytes);
  }
}

HandshakeStep HandshakeProtocol::step() const {
  if (refusal_.cause != Refusal::Cause::none) return HandshakeStep::refused;
  if (stage_ == kMessages) return HandshakeStep::done;
  return is_sending() ? HandshakeStep::want_write : HandshakeStep::want_read;
}

bool HandshakeProtocol::awaits_yes() const {
  return params_.patient && role_ == HandshakeRole::connector && stage_ == 3;
}

bool HandshakeProtocol::is_sending() const {
  return (stage_ % 2 == 0) == (role_ == HandshakeRole::connector);
}

// Prepares the message after the one that is complete.
void HandshakeProtocol::advance() {
  const bool connector = role_ == HandshakeRole::connector;
  switch (++stage_) {
    case 1:
      return connector ? expect_bytes(kAnswerBytes + kProofBytes) : answer_greeting();
    case 2:
      return connector ? check_listener() : expect_bytes(params_.agreed.size() + kProofBytes);
    case 3:
      return connector ? expect_bytes(1) : check_connector();
  }
  check_reply();
}

void HandshakeProtocol::answer_greeting() {
  claimed_rank_ = rank_in(message_);
  transcript_.add(message_);
  message_ = nonce_and_rank(params_.rank);
  transcript_.add(message_);
  message_ += text_of(transcript_.proof_of(HandshakeRole::listener));
}

void HandshakeProtocol::check_listener() {
  const std::string answer = message_.substr(0, kAnswerBytes);
  transcript_.add(answer);
  const auto proof = std::string_view(message_).substr(kAnswerBytes);
  if (!transcript_.is_proven(proof, HandshakeRole::listener)) return refuse_proof();
  if (!accept_peer(rank_in(answer), "answered")) return;
  message_ =
      params_.agreed + text_of(transcript_.proof_of(HandshakeRole::connector, params_.agreed));
}

void HandshakeProtocol::check_connector() {
  const std::string theirs = message_.substr(0, params_.agreed.size());
  const auto proof = std::string_view(message_).substr(theirs.size());
  if (!transcript_.is_proven(proof, HandshakeRole::connector, theirs)) return refuse_proof();
  if (!accept_peer(claimed_rank_, "connected")) return;
  const bool wanted = !params_.wanted || params_.wanted(peer_);
  message_.assign(1, theirs != params_.agreed ? kDifferent : wanted ? kYes : kNo);
}

// Both ends read the reply: the one that sent it, too.
void HandshakeProtocol::check_reply() {
  switch (message_[0]) {
    case kYes:
      return;
    case kNo:
      return refuse(Refusal::Cause::declined,
                    "the peer declined the connection: another one exists or is being made");
    case kDifferent:
      return refuse(Refusal::Cause::differs,
                    "the two ranks were given different descriptions of the group");
  }
  refuse(Refusal::Cause::other, "the other side sent an invalid reply");
}

// The rank at the other end, whose proof is verified; false if another one was expected.
bool HandshakeProtocol::accept_peer(int rank, const std::string& did) {
  peer_ = rank;
  if (params_.expected == -1 || params_.expected == rank) return true;
  refuse(Refusal::Cause::other, "rank " + std::to_string(rank) + " " + did + " where rank " +
                                    std::to_string(params_.expected) + " was expected");
  return false;
}

void HandshakeProtocol::refuse_proof() {
  refuse(Refusal::Cause::other,
         "the other side does not hold the same key, or is of another group or version");
}

}  // namespace pycomm::transport
