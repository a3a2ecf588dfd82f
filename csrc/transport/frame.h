// The 32-byte header of every frame. Each side describes its current call in it, so that a mismatch
// is detected before a byte of the payload is used, without extra messages.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace pycomm::transport {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

enum class FrameKind : uint8_t {
  data = 1,       // a segment of a call
  mismatch = 2,   // ranks made different calls in this epoch; the payload is the error text
  goodbye = 3,    // the last frame; the payload is the reason
  heartbeat = 4,  // no payload; the header describes the sender's last call
};

// A bit of `algorithm` for a call on device arrays: its frames only check that the ranks make the
// same call. A message is then announced by a header `send` and answered by a header `recv`.
inline constexpr uint8_t kOnDevice = 0x80;

// The context of an announced message if its sender also receives from the receiver at that time.
inline constexpr uint16_t kReceivesToo = 1;

// The state of the sender of a heartbeat.
enum class CallState : uint16_t { not_started, in_call, idle };

// Enums are sent as their numbers; the engine interprets them.
struct Header {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  FrameKind kind = FrameKind::data;
  uint8_t operation = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t algorithm = 0;
  uint16_t epoch = 0;  // number of mismatches of the group so far
  // heartbeat: CallState; data: a hash of the epoch's earlier calls; announcement or answer of a
  // message: kReceivesToo or 0
  uint16_t context = 0;
  uint32_t sequence = 0;  // index of the call in the epoch
  uint32_t peer = 0;      // root, tag of a message, hash of an all_gather's counts
  uint32_t bytes = 0;     // of payload behind this header
  uint64_t count = 0;     // elements of the whole call; all_to_all: from this rank to its peer

  static constexpr uint16_t kMagic = 0x6370;  // "pc"
  static constexpr uint8_t kVersion = 1;
};
static_assert(sizeof(Header) == 32);

// Maximum payload of a frame. A frame is begun when all of its payload is available: small enough
// that ranks in a chain overlap, large enough that the header is negligible (1/2048).
inline constexpr size_t kSegmentBytes = size_t{64} << 10;

// Maximum text of a notice (mismatch, goodbye).
inline constexpr size_t kNoticeBytes = 2048;

// Number of frames for `bytes` of payload: an empty message is one frame.
constexpr size_t frames_for(size_t bytes) {
  return bytes == 0 ? 1 : (bytes + kSegmentBytes - 1) / kSegmentBytes;
}

}  // namespace pycomm::transport
