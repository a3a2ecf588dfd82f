// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), to prove that two ranks hold the same key. Not
// for speed, not for encryption. Called by transport/handshake.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace pycomm {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// Takes the same time wherever the two differ, so that the time tells a guesser nothing.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace pycomm
