// The records of transport/encrypted.h: an attacker between two ends changes them, and no changed
// record is accepted.
#include "transport/encrypted.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "harness.h"
#include "os/aes_gcm.h"
#include "played_channels.h"

namespace {

using namespace pycomm;
using namespace pycomm::transport;
using namespace played;
using Buffer = std::vector<std::byte>;

constexpr size_t kOverhead = 20;   // of a record: its length and its tag
constexpr int kTries = 1'000'000;  // of a loop that must end

// An encrypted channel over one that takes at most `capacity` bytes a call, and none while the wire
// holds `limit`.
std::unique_ptr<Channel> encrypted(Wire& out, Wire& in, size_t capacity, size_t limit,
                                   const Session& session) {
  return make_encrypted(std::make_unique<Pipe>(out, in, limit, [=] { return capacity; }), session);
}

struct Line {
  explicit Line(size_t capacity = SIZE_MAX, size_t limit = SIZE_MAX,
                const std::string& secret = "s")
      : connector(encrypted(there, back, capacity, limit, {"s", true, 5})),
        listener(encrypted(back, there, capacity, limit, {secret, false, 5})) {}
  Wire there, back;
  std::unique_ptr<Channel> connector, listener;
};

Buffer pattern(size_t bytes, int seed = 0) {
  Buffer buffer(bytes);
  for (size_t i = 0; i < bytes; ++i) buffer[i] = static_cast<std::byte>(i * 31 + i / 251 + seed);
  return buffer;
}

// All bytes that the channel delivers.
Buffer drained(Channel& channel) {
  Buffer all, into(1000);
  while (const size_t n = channel.receive(into))
    all.insert(all.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(n));
  return all;
}

Buffer record(Line& line, const Buffer& plain) {
  line.there.clear();
  expect_equal(line.connector->send(plain, {}), plain.size(), "bytes taken");
  return {line.there.begin(), line.there.end()};
}

// Three records of 100 bytes as an attacker passes them on; the first `good` arrive, no more.
void attack(const std::string& what, size_t good,
            const std::function<Buffer(std::vector<Buffer>&)>& change) {
  Line line;
  std::vector<Buffer> records;
  for (int i = 0; i < 3; ++i) records.push_back(record(line, pattern(100, i)));
  const Buffer changed = change(records);
  line.there.assign(changed.begin(), changed.end());
  const Buffer got = drained(*line.listener);
  Buffer wanted;
  for (size_t i = 0; i < good; ++i) {
    const Buffer one = pattern(100, static_cast<int>(i));
    wanted.insert(wanted.end(), one.begin(), one.end());
  }
  expect(got == wanted, what + ": delivered bytes");
  expect(line.listener->is_closed(), what + ": the channel is still open");
  expect(line.listener->protocol_error().find("altered, replayed") != std::string_view::npos,
         what + ": the reason");
  const Buffer more = record(line, pattern(10));
  line.there.assign(more.begin(), more.end());
  expect(drained(*line.listener).empty(), what + ": bytes behind it were delivered");
}

Buffer joined(const std::vector<Buffer>& records) {
  Buffer all;
  for (const Buffer& one : records) all.insert(all.end(), one.begin(), one.end());
  return all;
}

const Test kAttacks("a record that was changed, replayed, moved or dropped ends the channel", [] {
  for (size_t i = 0; i < 100 + kOverhead; ++i) {
    for (const int bit : {0, 7}) {
      Line line;
      Buffer one = record(line, pattern(100));
      one[i] ^= static_cast<std::byte>(1 << bit);
      one.resize(200'000);  // enough for any length
      line.there.assign(one.begin(), one.end());
      expect(drained(*line.listener).empty(), "plaintext of a changed record");
      expect(line.listener->is_closed(), "byte " + std::to_string(i) + " may be changed");
    }
  }
  attack("replayed", 1, [](auto& r) { return joined({r[0], r[0], r[1]}); });
  attack("moved", 0, [](auto& r) { return joined({r[1], r[0], r[2]}); });
  attack("dropped", 1, [](auto& r) { return joined({r[0], r[2]}); });
  attack("cut", 1, [](auto& r) {
    r[1].pop_back();
    return joined(r);
  });
  attack("too long", 3, [](auto& r) {
    Buffer all = joined(r);
    all.resize(all.size() + 4, std::byte{0xff});
    return all;
  });
  attack("empty", 3, [](auto& r) {
    Buffer all = joined(r);
    all.resize(all.size() + kOverhead);
    return all;
  });
});

const Test kReflected("an end rejects its own records and those of another secret", [] {
  Line line;
  const Buffer own = record(line, pattern(100));
  line.back.assign(own.begin(), own.end());
  expect(drained(*line.connector).empty() && line.connector->is_closed(),
         "it accepted its own record");
  Line other(SIZE_MAX, SIZE_MAX, "another");
  (void)other.connector->send(pattern(100), {});
  expect(drained(*other.listener).empty() && other.listener->is_closed(), "under another secret");
});

const Test kHidden("the same plaintext is never the same on the wire, nor seen there", [] {
  Line line;
  const Buffer plain = pattern(1000);
  std::vector<Buffer> seen;
  for (int i = 0; i < 20; ++i) {  // through several keys
    Buffer one = record(line, plain);
    expect_equal(one.size(), plain.size() + kOverhead, "bytes of a record");
    expect(std::ranges::search(one, std::span(plain).first(8)).empty(), "plaintext on the wire");
    for (const Buffer& before : seen) expect(one != before, "two records are equal");
    seen.push_back(std::move(one));
  }
});

const Test kCut("any stream arrives whole, however records and sends are split", [] {
  std::mt19937 random(7);
  for (const size_t capacity : {1, 7, 1000, 100'000}) {
    Line line(capacity, 50'000);
    const Buffer plain = pattern(capacity == 1 ? 3'000 : 300'000);
    size_t sent = 0;
    Buffer got, into(70'000);
    for (int i = 0; i < kTries && got.size() < plain.size(); ++i) {
      const ConstBytes left = ConstBytes(plain).subspan(sent);
      const size_t head = std::min<size_t>(left.size(), random() % 40);
      sent += line.connector->send(left.first(head), left.subspan(head));
      const size_t n = line.listener->receive(Bytes(into).first(1 + random() % into.size()));
      got.insert(got.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(n));
    }
    expect(got == plain, "what arrived");
  }
});

const Test kPending("pending bytes at the end follow a half-sent record", [] {
  Line line(10, 10);
  const Buffer plain = pattern(500);
  expect_equal(line.connector->send(plain, {}), size_t{499}, "taken, but for a byte");
  expect_equal(line.connector->send(ConstBytes(plain).last(1), {}), size_t{0}, "the wire is full");
  const Buffer behind = pattern(100'000, 3);
  Buffer pending{plain.back()};
  pending.insert(pending.end(), behind.begin(), behind.end());
  line.connector->close(pending);
  Buffer wanted = plain;
  wanted.insert(wanted.end(), behind.begin(), behind.end());
  expect(drained(*line.listener) == wanted, "what arrived");
});

const Test kLibrary("without OpenSSL's library the error says so", [] {
  const std::string text =
      expect_throws<Unsupported>([] { (void)os::crypto_library("libcrypto.so.none"); });
  expect_says(text, "needs OpenSSL 3");
  const std::string lacking =
      expect_throws<Unsupported>([] { (void)os::crypto_library("libc.so.6"); });
  expect_says(lacking, "missing function EVP_");
});

// NIST's GCM test vectors (gcmEncryptExtIV256), and test case 16 of McGrew and Viega.
const Test kVector("a known answer of AES-256-GCM", [] {
  const auto bytes = [](const std::string& hex) {
    Buffer all;
    for (size_t i = 0; i < hex.size(); i += 2)
      all.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    return all;
  };
  const Buffer key = bytes("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308");
  const Buffer iv = bytes("cafebabefacedbaddecaf888");
  const Buffer header = bytes("feedfacedeadbeeffeedfacedeadbeefabaddad2");
  const Buffer plain = bytes(
      "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e24"
      "49a6"
      "b525b16aedf5aa0de657ba637b39");
  const Buffer wanted = bytes(
      "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b10"
      "56828"
      "838c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b");
  std::array<uint8_t, os::AesGcm::kKeyBytes> k{};
  os::AesGcm::Nonce nonce{};
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::to_integer<uint8_t>(key[i]);
  for (size_t i = 0; i < nonce.size(); ++i) nonce[i] = std::to_integer<uint8_t>(iv[i]);
  Buffer out(wanted.size());
  os::AesGcm encrypt(os::AesGcm::Direction::encrypt, k), decrypt(os::AesGcm::Direction::decrypt, k);
  encrypt.encrypt(nonce, header, ConstBytes(plain).first(7), ConstBytes(plain).subspan(7),
                  out.data());
  expect(out == wanted, "the ciphertext and its tag");
  Buffer back(plain.size());
  expect(decrypt.decrypt(nonce, header, out, back.data()) && back == plain, "decrypted");
  out.back() ^= std::byte{1};
  expect(!decrypt.decrypt(nonce, header, out, back.data()), "a wrong tag was taken");
  expect(back == Buffer(plain.size()), "plaintext of a wrong tag was left");
});

}  // namespace
