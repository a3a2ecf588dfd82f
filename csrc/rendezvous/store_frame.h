// The wire format of the TCP store after the handshake: one request, one reply, in turn. For any
// bytes, parsing returns a frame, "more bytes are needed" or "broken", and never holds more than
// the limits below.
//
//   request: verb (1 byte), bytes of key (4), bytes of value (4), wait time in ms (4),
//            client (8), number (8), oldest (8), key, value
//   reply:   status (1 byte), bytes of value (4), value
//
// For `add`, the amount and the sum are decimal text.
//
// A client that loses a connection sends the request again on another one. To apply no change
// twice, the server keeps the reply to each change by client and number while the client may need
// it: `oldest` is the lowest number that the client still waits for. `hello` is the first request
// on each connection: the reply names the server and the port at which its clients reconnect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pycomm::rendezvous::store_frame {

inline constexpr size_t kMaxKeyBytes = 1024, kMaxValueBytes = size_t{1} << 20;
inline constexpr size_t kMaxStoreBytes = size_t{1} << 28;  // of all keys and values of a server
inline constexpr size_t kRequestHeadBytes = 37, kReplyHeadBytes = 5;
inline constexpr std::string_view kContext = "pycomm store";  // context of the handshake
inline constexpr int kServerRank = 0, kClientRank = 1;        // ranks in the handshake

enum class Verb : uint8_t { set = 1, get = 2, add = 3, remove = 4, claim = 5, hello = 6 };
// refused: the value is the reason as text.
enum class Status : uint8_t { ok = 1, absent = 2, full = 3, refused = 4 };

struct Request {
  Verb verb = Verb::get;
  uint32_t wait_ms = 0;  // get: if the key is not set within this time, the reply is `absent`
  std::string key, value;
  uint64_t client = 0;  // random number that identifies the client
  uint64_t number = 0;  // of a change, from 1; 0: the reply is not kept
  uint64_t oldest = 0;  // replies to changes with lower numbers are no longer needed
};

struct Reply {
  Status status = Status::ok;
  std::string value;
};

enum class Parse : uint8_t { complete, more, broken };

// `needed`: the size of the frame if it is known, else of its header.
template <typename Frame>
struct Parsed {
  Parse parse = Parse::more;
  size_t needed = 0;
  Frame frame{};
};

inline void put_u32(std::string& bytes, size_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
}

inline void put_u64(std::string& bytes, uint64_t value) {
  put_u32(bytes, value & 0xffff'ffff);
  put_u32(bytes, value >> 32);
}

inline uint32_t u32_at(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return value;
}

inline uint64_t u64_at(std::string_view bytes, size_t at) {
  return u32_at(bytes, at) | uint64_t{u32_at(bytes, at + 4)} << 32;
}

inline std::string encode(const Request& request) {
  std::string bytes(1, static_cast<char>(request.verb));
  put_u32(bytes, request.key.size());
  put_u32(bytes, request.value.size());
  put_u32(bytes, request.wait_ms);
  for (const uint64_t field : {request.client, request.number, request.oldest})
    put_u64(bytes, field);
  return bytes + request.key + request.value;
}

inline std::string encode(const Reply& reply) {
  std::string bytes(1, static_cast<char>(reply.status));
  put_u32(bytes, reply.value.size());
  return bytes + reply.value;
}

inline Parsed<Request> parse_request(std::string_view bytes) {
  Parsed<Request> parsed{Parse::more, kRequestHeadBytes, {}};
  if (bytes.size() < kRequestHeadBytes) return parsed;
  const auto verb = static_cast<Verb>(bytes[0]);
  const size_t key_bytes = u32_at(bytes, 1), value_bytes = u32_at(bytes, 5);
  const bool brings_value = verb == Verb::set || verb == Verb::add || verb == Verb::claim;
  const bool asks = verb == Verb::get || verb == Verb::remove || verb == Verb::hello;
  const bool known = brings_value || (asks && value_bytes == 0);
  if (!known || key_bytes > kMaxKeyBytes || value_bytes > kMaxValueBytes) {
    parsed.parse = Parse::broken;
    return parsed;
  }
  parsed.needed = kRequestHeadBytes + key_bytes + value_bytes;
  if (bytes.size() < parsed.needed) return parsed;
  parsed.parse = bytes.size() == parsed.needed ? Parse::complete : Parse::broken;
  parsed.frame = {verb,
                  u32_at(bytes, 9),
                  std::string(bytes.substr(kRequestHeadBytes, key_bytes)),
                  std::string(bytes.substr(kRequestHeadBytes + key_bytes, value_bytes)),
                  u64_at(bytes, 13),
                  u64_at(bytes, 21),
                  u64_at(bytes, 29)};
  return parsed;
}

inline Parsed<Reply> parse_reply(std::string_view bytes) {
  Parsed<Reply> parsed{Parse::more, kReplyHeadBytes, {}};
  if (bytes.size() < kReplyHeadBytes) return parsed;
  const auto status = static_cast<Status>(bytes[0]);
  const size_t value_bytes = u32_at(bytes, 1);
  const bool known = status >= Status::ok && status <= Status::refused;
  if (!known || value_bytes > kMaxValueBytes) {
    parsed.parse = Parse::broken;
    return parsed;
  }
  parsed.needed = kReplyHeadBytes + value_bytes;
  if (bytes.size() < parsed.needed) return parsed;
  parsed.parse = bytes.size() == parsed.needed ? Parse::complete : Parse::broken;
  parsed.frame = {status, std::string(bytes.substr(kReplyHeadBytes))};
  return parsed;
}

}  // namespace pycomm::rendezvous::store_frame
