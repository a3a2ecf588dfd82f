// A channel whose bytes are encrypted and authenticated: AES-256-GCM in records, each with the next
// nonce of its direction. An altered, replayed, missing or reordered record ends the channel, and
// none of its bytes are returned.
//
//   4 bytes   n, the length of the plaintext: 1 to 65568, little-endian; authenticated too
//   n bytes   ciphertext
//   16 bytes  tag
//
// The nonce is the direction's 12-byte IV, its last 8 bytes XORed with the number of the record,
// counted from 0. After `records_per_key` records both ends derive the direction's next key. Keys
// are derived from the session secret of the handshake by HKDF-SHA-256 (RFC 5869), so that each
// direction of each connection has its own. docs/internals/wire.md has the labels.
//
// There is no forward secrecy: a holder of the run's key can decrypt a recorded connection.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace pycomm::transport {

struct Session {
  std::string secret;      // Handshake::session_secret()
  bool connector = false;  // this end's role
  // 2^24 records of at most 64 KiB: 2^36 AES blocks with one key.
  uint64_t records_per_key = uint64_t{1} << 24;
};

// Only the handshake may have used `inner` before; its peek() is not used. Throws Unsupported if
// OpenSSL cannot be loaded.
std::unique_ptr<Channel> make_encrypted(std::unique_ptr<Channel> inner, const Session& session);

}  // namespace pycomm::transport
