// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for handshakes and key derivation. Not
// optimized for speed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace pycomm {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// Its run time does not depend on the digests, so that it reveals nothing to an attacker.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace pycomm
