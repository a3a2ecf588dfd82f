#include "transport/encrypted.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/sha256.h"
#include "os/aes_gcm.h"
#include "transport/frame.h"

namespace pycomm::transport {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kOverhead = kLengthBytes + os::AesGcm::kTagBytes;
// A frame of full size is one record.
constexpr size_t kMostPlain = sizeof(Header) + kSegmentBytes;
constexpr size_t kMostRecord = kMostPlain + kOverhead;
// Maximum bytes that are read from the kernel at once, and that are decrypted ahead.
constexpr size_t kCipherBytes = 2 * kMostRecord, kPlainBytes = 2 * kMostPlain;

using Length = std::array<std::byte, kLengthBytes>;

// HKDF-Expand of at most one block: HMAC(secret, label || 0x01).
Digest expand(std::string_view secret, std::string_view label) {
  return hmac_sha256(secret, std::string(label) + '\x01');
}

std::string text_of(const Digest& digest) { return {digest.begin(), digest.end()}; }

// The successive keys of one direction, and the number of the next record.
class Keys {
 public:
  Keys(os::AesGcm::Direction direction, std::string secret, uint64_t records_per_key)
      : secret_(std::move(secret)),
        records_per_key_(records_per_key),
        cipher_(direction, expand(secret_, "pycomm 1 key")),
        iv_(expand(secret_, "pycomm 1 iv")) {}

  os::AesGcm& cipher() { return cipher_; }

  // The nonce of the next record; never returns the same one twice with one key.
  os::AesGcm::Nonce next() {
    check(number_ != UINT64_MAX, "a connection has used up its nonces");
    if (number_ > 0 && number_ % records_per_key_ == 0) renew();
    os::AesGcm::Nonce nonce{};
    std::copy_n(iv_.begin(), nonce.size(), nonce.begin());
    for (size_t i = 0; i < 8; ++i)
      nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(number_ >> (8 * i));
    ++number_;
    return nonce;
  }

 private:
  void renew() {
    secret_ = text_of(expand(secret_, "pycomm 1 next"));
    cipher_.set_key(expand(secret_, "pycomm 1 key"));
    iv_ = expand(secret_, "pycomm 1 iv");
  }

  std::string secret_;
  uint64_t records_per_key_, number_ = 0;
  os::AesGcm cipher_;
  Digest iv_;
};

Length length_of(size_t bytes) {
  Length length{};
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<std::byte>(bytes >> (8 * i));
  return length;
}

size_t length_at(const std::byte* at) {
  size_t bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) bytes |= std::to_integer<size_t>(at[i]) << (8 * i);
  return bytes;
}

class Encrypted final : public Channel {
 public:
  Encrypted(std::unique_ptr<Channel> inner, const Session& session)
      : inner_(std::move(inner)),
        out_keys_(os::AesGcm::Direction::encrypt, secret_of(session, session.connector),
                  session.records_per_key),
        in_keys_(os::AesGcm::Direction::decrypt, secret_of(session, !session.connector),
                 session.records_per_key),
        record_(kMostRecord),
        cipher_(kCipherBytes),
        plain_(kPlainBytes + kMostPlain) {}

  std::string_view transport() const override { return inner_->transport(); }
  std::chrono::microseconds round_trip() const override { return inner_->round_trip(); }
  void expect_more(bool more) override { inner_->expect_more(more); }
  bool polling_is_expensive() const override { return inner_->polling_is_expensive(); }
  void wake_peer() override { inner_->wake_peer(); }
  std::string_view protocol_error() const override {
    return invalid_.empty() ? inner_->protocol_error() : invalid_;
  }

  // If a record does not fit at once, all its bytes but the last count as taken: so the caller
  // continues to send until the record is sent, and never withdraws a frame that is in it.
  size_t send(ConstBytes head, ConstBytes body) override {
    if (is_closed()) return head.size() + body.size();
    size_t taken = 0;
    if (sending()) {
      if (head.empty() && body.empty()) return 0;
      if (!push()) return 0;
      taken = 1;
      drop_first(head, body, 1);
    }
    while (!head.empty() || !body.empty()) {
      const size_t n = seal(head, body);
      if (!push()) return taken + n - 1;
      taken += n;
      drop_first(head, body, n);
    }
    return taken;
  }

  ConstBytes peek(size_t want) override {
    pull(std::min(want, kPlainBytes));
    return {plain_.data() + begin_, std::min(want, end_ - begin_)};
  }
  void take(size_t bytes) override { begin_ += bytes; }
  size_t receive(Bytes into) override {
    const ConstBytes here = peek(into.size());
    if (here.empty()) return 0;
    std::memcpy(into.data(), here.data(), here.size());
    take(here.size());
    return here.size();
  }

  bool is_closed() const override { return !invalid_.empty() || inner_->is_closed(); }

  pollfd arm(Want want) override {
    // A lower bound of the bytes that must still arrive.
    const size_t here = end_ - begin_ + cipher_end_ - cipher_begin_;
    want.bytes = want.bytes > here ? want.bytes - here : 1;
    return inner_->arm(want);
  }
  void disarm(short revents) override { inner_->disarm(revents); }

  void close(ConstBytes unsent) override {
    std::vector<std::byte> rest;
    try {
      rest = sealed(unsent);
    } catch (const std::exception&) {  // out of memory: the peer sees only the closed connection
      rest.clear();
    }
    inner_->close(rest);
  }

 private:
  static std::string secret_of(const Session& session, bool from_connector) {
    return text_of(expand(session.secret, from_connector ? "pycomm 1 connector to listener"
                                                         : "pycomm 1 listener to connector"));
  }

  static void drop_first(ConstBytes& head, ConstBytes& body, size_t bytes) {
    const size_t in_head = std::min(bytes, head.size());
    head = head.subspan(in_head);
    body = body.subspan(bytes - in_head);
  }

  // The rest of the current record, followed by records with `unsent`.
  std::vector<std::byte> sealed(ConstBytes unsent) {
    std::vector<std::byte> all;
    const auto add = [&] {
      const ConstBytes left = ConstBytes(record_).subspan(sent_, record_end_ - sent_);
      all.insert(all.end(), left.begin(), left.end());
    };
    if (sending()) {
      add();
      if (!unsent.empty()) unsent = unsent.subspan(1);
    }
    while (!unsent.empty()) {
      unsent = unsent.subspan(seal(unsent, {}));
      add();
    }
    return all;
  }

  bool sending() const { return sent_ < record_end_; }

  // Makes the next record; returns the number of plaintext bytes in it.
  size_t seal(ConstBytes head, ConstBytes body) {
    head = head.first(std::min(head.size(), kMostPlain));
    body = body.first(std::min(body.size(), kMostPlain - head.size()));
    const size_t n = head.size() + body.size();
    const Length length = length_of(n);
    std::copy(length.begin(), length.end(), record_.begin());
    const auto nonce = out_keys_.next();
    out_keys_.cipher().encrypt(nonce, length, head, body, record_.data() + kLengthBytes);
    sent_ = 0;
    record_end_ = n + kOverhead;
    return n;
  }

  // True when the record is sent.
  bool push() {
    while (sending()) {
      const size_t n = inner_->send(ConstBytes(record_).subspan(sent_, record_end_ - sent_), {});
      if (n == 0) return false;
      sent_ += n;
    }
    return true;
  }

  // Decrypts what has arrived, until `want` bytes are available or no more records are complete.
  void pull(size_t want) {
    while (end_ - begin_ < want && invalid_.empty()) {
      if (open()) continue;
      if (!invalid_.empty() || cipher_end_ == cipher_.size()) return;
      const size_t n = inner_->receive(Bytes(cipher_).subspan(cipher_end_));
      if (n == 0) return;
      cipher_end_ += n;
    }
  }

  // Decrypts the next record, if it has arrived completely.
  bool open() {
    const size_t here = cipher_end_ - cipher_begin_;
    if (here == 0) cipher_begin_ = cipher_end_ = 0;
    if (begin_ == end_) begin_ = end_ = 0;
    if (here < kLengthBytes) return make_space(), false;
    const std::byte* at = cipher_.data() + cipher_begin_;
    const size_t n = length_at(at);
    if (n == 0 || n > kMostPlain)
      return refuse("a record has " + std::to_string(n) + " bytes of plaintext");
    if (here < n + kOverhead) return make_space(), false;
    if (end_ + n > plain_.size()) {
      std::memmove(plain_.data(), plain_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    check(end_ + n <= plain_.size(), "the buffer of decrypted bytes is too small");
    const auto nonce = in_keys_.next();
    if (!in_keys_.cipher().decrypt(nonce, {at, kLengthBytes},
                                   {at + kLengthBytes, n + os::AesGcm::kTagBytes},
                                   plain_.data() + end_))
      return refuse("a record has an invalid tag");
    end_ += n;
    cipher_begin_ += n + kOverhead;
    return true;
  }

  // Moves a partial record to the front of the buffer if its rest would not fit behind it.
  void make_space() {
    if (cipher_begin_ == 0 || cipher_.size() - cipher_begin_ >= kMostRecord) return;
    std::memmove(cipher_.data(), cipher_.data() + cipher_begin_, cipher_end_ - cipher_begin_);
    cipher_end_ -= cipher_begin_;
    cipher_begin_ = 0;
  }

  bool refuse(const std::string& what) {
    invalid_ = what + ": the encrypted stream was altered, replayed, reordered or truncated";
    return false;
  }

  std::unique_ptr<Channel> inner_;
  Keys out_keys_, in_keys_;
  std::vector<std::byte> record_;     // the record that is being sent
  size_t sent_ = 0, record_end_ = 0;  // its bytes sent, and its size
  std::vector<std::byte> cipher_;     // received, not yet decrypted
  size_t cipher_begin_ = 0, cipher_end_ = 0;
  std::vector<std::byte> plain_;  // decrypted and authenticated, not yet taken
  size_t begin_ = 0, end_ = 0;
  std::string invalid_;  // the protocol error that ended receiving; empty: none
};

}  // namespace

std::unique_ptr<Channel> make_encrypted(std::unique_ptr<Channel> inner, const Session& session) {
  check(!session.secret.empty() && session.records_per_key > 0,
        "an encrypted session has no secret or no records per key");
  return std::make_unique<Encrypted>(std::move(inner), session);
}

}  // namespace pycomm::transport
