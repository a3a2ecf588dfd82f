// See sha256.h. Names follow FIPS 180-4.
#include "core/sha256.h"

#include <bit>
#include <cstddef>
#include <string>

namespace pycomm {
namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
constexpr State kInitialState{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

std::array<uint32_t, 64> message_schedule(std::string_view block) {
  std::array<uint32_t, 64> w{};
  for (size_t i = 0; i < kBlockBytes; ++i)
    w[i / 4] = (w[i / 4] << 8) | static_cast<uint8_t>(block[i]);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t a = w[t - 15], b = w[t - 2];
    const uint32_t sigma0 = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
    const uint32_t sigma1 = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
    w[t] = sigma1 + w[t - 7] + sigma0 + w[t - 16];
  }
  return w;
}

void compress(State& hash, std::string_view block) {
  const auto w = message_schedule(block);
  auto [a, b, c, d, e, f, g, h] = hash;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t t1 = h + sum1 + choice + kRoundConstants[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + sum0 + majority;
  }
  const State mixed{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < hash.size(); ++i) hash[i] += mixed[i];
}

std::string_view view_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

Digest sha256(std::string_view data) {
  State hash = kInitialState;
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (; data.size() >= kBlockBytes; data.remove_prefix(kBlockBytes))
    compress(hash, data.substr(0, kBlockBytes));
  // A one bit, zeros up to 8 bytes short of a block, and the length in bits, most significant
  // first.
  std::string tail(data);
  tail.push_back('\x80');
  while (tail.size() % kBlockBytes != kBlockBytes - 8) tail.push_back('\0');
  for (int shift = 56; shift >= 0; shift -= 8) tail.push_back(static_cast<char>(bits >> shift));
  for (size_t at = 0; at < tail.size(); at += kBlockBytes)
    compress(hash, std::string_view(tail).substr(at, kBlockBytes));
  Digest digest{};
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<uint8_t>(hash[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
  std::string padded(key.size() > kBlockBytes ? std::string(view_of(sha256(key)))
                                              : std::string(key));
  padded.resize(kBlockBytes, '\0');
  std::string inner(padded), outer(padded);
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  inner.append(data);
  outer.append(view_of(sha256(inner)));
  return sha256(outer);
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  volatile uint8_t difference = 0;  // volatile: the compiler must not add an early exit
  for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace pycomm
