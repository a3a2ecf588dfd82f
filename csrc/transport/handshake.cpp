// See handshake.h.
#include "transport/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/errors.h"
#include "os/random.h"
#include "os/socket.h"

namespace pycomm::transport {
namespace {

constexpr size_t kNonceBytes = 32, kRankBytes = 4, kProofBytes = 32;
constexpr size_t kGreetingBytes = kNonceBytes + kRankBytes;
constexpr size_t kAnswerBytes = kNonceBytes + kRankBytes;
constexpr char kYes = 'y', kNo = 'n', kDifferent = 'd';

std::string text_of(const std::array<uint8_t, 32>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string little_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

std::string rank_bytes(int rank) { return little_endian(static_cast<uint32_t>(rank)); }

int rank_at(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < kRankBytes; ++i)
    value |= uint32_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return static_cast<int>(value);
}

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

Handshake::Handshake(os::Fd fd, Role role, std::string key, HandshakeParams params,
                     std::chrono::nanoseconds limit)
    : fd_(std::move(fd)),
      role_(role),
      key_(std::move(key)),
      params_(std::move(params)),
      deadline_(limit) {
  if (key_.empty()) throw InvalidArgument("the key of a connection is empty");
  if (role_ == Role::connector) {
    greeting_ = text_of(os::random_bytes()) + rank_bytes(params_.rank);
    buffer_ = greeting_;
  } else {
    expect_bytes(kGreetingBytes);
  }
}

Handshake::Step Handshake::advance() {
  while (state_ != Step::done && state_ != Step::refused) {
    if (deadline_.expired() && !awaits_yes()) {
      refuse(role_ == Role::connector && !connected_
                 ? "nothing answered within the limit"
                 : "the other side did not finish the handshake within its limit");
    } else if (transfer()) {
      ++stage_;
      moved_ = 0;
      next();
    } else {
      break;
    }
  }
  return state_;
}

// The listener may already have replied yes: closing the connection now would look like a failure.
bool Handshake::awaits_yes() const {
  return params_.patient && role_ == Role::connector && stage_ == 3;
}

os::Fd Handshake::release() {
  check(state_ == Step::done, "a connection was released before its handshake was done");
  return std::move(fd_);
}

bool Handshake::is_sending() const { return (stage_ % 2 == 0) == (role_ == Role::connector); }

// Sends or receives what the socket allows now; true when the message is complete.
bool Handshake::transfer() {
  state_ = is_sending() ? Step::want_write : Step::want_read;
  if (role_ == Role::connector && !connected_) {
    const int error = os::connect_error(fd_.get());
    if (error == EINPROGRESS) return false;
    if (error != 0) {
      no_listener_ = error == ECONNREFUSED;
      refuse(reason(error));
      return false;
    }
    connected_ = true;
  }
  while (moved_ < buffer_.size()) {
    char* at = buffer_.data() + moved_;
    const size_t left = buffer_.size() - moved_;
    const ssize_t got =
        is_sending() ? ::send(fd_.get(), at, left, MSG_NOSIGNAL) : ::recv(fd_.get(), at, left, 0);
    if (got > 0) {
      moved_ += static_cast<size_t>(got);
    } else if (got == 0) {
      disconnected_ = true;
      refuse("the other side closed the connection during the handshake");
      return false;
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      disconnected_ = errno == ECONNRESET || errno == EPIPE;
      refuse("the connection broke during the handshake: " + reason(errno));
      return false;
    }
  }
  return true;
}

// Prepares the message after the one that is complete.
void Handshake::next() {
  const bool connector = role_ == Role::connector;
  switch (stage_) {
    case 1:
      return connector ? expect_bytes(kAnswerBytes + kProofBytes) : answer_greeting();
    case 2:
      return connector ? check_listener() : expect_bytes(params_.agreed.size() + kProofBytes);
    case 3:
      return connector ? expect_bytes(1) : check_connector();
  }
  declined_ = buffer_[0] == kNo;
  if (declined_)
    return refuse("the peer declined the connection: another one exists or is being made");
  differs_ = buffer_[0] == kDifferent;
  if (differs_) return refuse("the two ranks were given different descriptions of the group");
  if (connector && buffer_[0] != kYes) return refuse("the other side sent an invalid reply");
  state_ = Step::done;
}

void Handshake::answer_greeting() {
  greeting_ = buffer_;
  answer_ = text_of(os::random_bytes()) + rank_bytes(params_.rank);
  buffer_ = answer_ + text_of(proof_of(Role::listener, {}));
}

void Handshake::check_listener() {
  answer_ = buffer_.substr(0, kAnswerBytes);
  if (!is_proven(std::string_view(buffer_).substr(kAnswerBytes), Role::listener, {})) return;
  peer_ = rank_at(answer_, kNonceBytes);
  if (params_.expected != -1 && params_.expected != peer_)
    return refuse("rank " + std::to_string(peer_) + " answered where rank " +
                  std::to_string(params_.expected) + " was expected");
  buffer_ = params_.agreed + text_of(proof_of(Role::connector, params_.agreed));
}

void Handshake::check_connector() {
  const std::string theirs = buffer_.substr(0, params_.agreed.size());
  const auto proof = std::string_view(buffer_).substr(theirs.size());
  if (!is_proven(proof, Role::connector, theirs)) return;
  peer_ = rank_at(greeting_, kNonceBytes);
  if (params_.expected != -1 && params_.expected != peer_)
    return refuse("rank " + std::to_string(peer_) + " called where rank " +
                  std::to_string(params_.expected) + " was expected");
  const bool wanted = !params_.wanted || params_.wanted(peer_);
  buffer_.assign(1, theirs != params_.agreed ? kDifferent : wanted ? kYes : kNo);
}

bool Handshake::is_proven(std::string_view proof, Role signer, std::string_view agreed) {
  Digest got{};
  std::copy(proof.begin(), proof.end(), got.begin());
  if (equal_in_constant_time(got, proof_of(signer, agreed))) return true;
  refuse("the other side does not hold the same key, or is of another group or version");
  return false;
}

Digest Handshake::proof_of(Role signer, std::string_view agreed) const {
  return keyed_digest(signer == Role::listener ? "pycomm 1 listener" : "pycomm 1 connector",
                      agreed);
}

std::string Handshake::session_secret() const {
  check(state_ == Step::done, "a session began before its handshake was done");
  return text_of(keyed_digest("pycomm 1 session", {}));
}

Digest Handshake::keyed_digest(const std::string& label, std::string_view agreed) const {
  // The length precedes the context and everything else has a fixed size: different conversations
  // have different bytes.
  return hmac_sha256(key_, label + '\0' +
                               little_endian(static_cast<uint32_t>(params_.context.size())) +
                               params_.context + greeting_ + answer_ + std::string(agreed));
}

void Handshake::expect_bytes(size_t bytes) { buffer_.assign(bytes, '\0'); }

void Handshake::refuse(const std::string& why) {
  why_ = why;
  state_ = Step::refused;
  fd_.reset();
}

}  // namespace pycomm::transport
