// A channel whose bytes are encrypted and authenticated: AES-256-GCM in records, each under the
// next nonce of its direction. A record that was altered, replayed, dropped or moved ends the
// channel, and no byte of it is given out.
//
//   4 bytes   n, the length of the plaintext: 1 to 65568, little-endian; authenticated too
//   n bytes   ciphertext
//   16 bytes  tag
//
// The nonce is the direction's 12-byte IV, its last 8 bytes XORed with the number of the record,
// counted from 0. After so many records both ends derive the next key of the direction. Keys come
// from the secret of the connection's handshake by HKDF-SHA-256 (RFC 5869), so that each direction
// of each connection has its own. docs/internals/wire.md has the labels.
//
// There is no forward secrecy: a holder of the run's key who recorded a connection can decrypt it.
// Called by group/connector.cpp for connections that leave a host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace pycomm {

struct Session {
  std::string secret;      // Handshake::session_secret()
  bool connector = false;  // which end this is
  // 2^24 of at most 64 KiB: 2^36 blocks of AES under one key.
  uint64_t records_per_key = uint64_t{1} << 24;
};

// `inner` is bare: nothing but the handshake has passed it, and its peek() is not used. Throws
// Unsupported where OpenSSL cannot be loaded.
std::unique_ptr<Channel> make_encrypted(std::unique_ptr<Channel> inner, const Session& session);

}  // namespace pycomm
