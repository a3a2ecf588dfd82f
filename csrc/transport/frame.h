// The 32-byte header of every frame. Both sides fill in what they consider the call to be, so that
// a disagreement is detected before a byte of the payload is used; the check costs nothing else.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace pycomm {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

enum class FrameKind : uint8_t {
  data = 1,       // a segment of a call
  mismatch = 2,   // "we disagree about a call of this epoch": the payload says how
  goodbye = 3,    // the last frame: the payload says why
  heartbeat = 4,  // a sign of life: a header alone, which says what its sender called last
};

// Added to the algorithm of a call whose arrays lie on devices: its frames carry the agreement
// alone. A message is then announced by a header that says send and answered by one that says recv.
inline constexpr uint8_t kOnDevice = 0x80;

// Where the sender of a heartbeat is.
enum class CallState : uint16_t { not_started, in_call, idle };

// The numbers of enums travel as they are; what they mean is the engine's business.
struct Header {
  uint16_t magic = kMagic;
  uint8_t version = kVersion;
  FrameKind kind = FrameKind::data;
  uint8_t operation = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t algorithm = 0;
  uint16_t epoch = 0;     // counts the mismatches that the group has survived
  uint16_t context = 0;   // of a heartbeat: CallState; of data: a hash of the calls before it
  uint32_t sequence = 0;  // which call of the epoch
  uint32_t peer = 0;      // root, tag of a message, hash of an all_gather's counts
  uint32_t bytes = 0;     // of payload behind this header
  uint64_t count = 0;     // elements of the whole call; all_to_all: from this rank to its peer

  static constexpr uint16_t kMagic = 0x6370;  // "pc"
  static constexpr uint8_t kVersion = 1;
};
static_assert(sizeof(Header) == 32);

// Payload per frame. A frame is begun when all of it is there: small enough that ranks in a chain
// work at the same time, large enough that its header costs nothing (1/2048).
inline constexpr size_t kSegmentBytes = size_t{64} << 10;

// A notice (mismatch, goodbye) carries one sentence.
inline constexpr size_t kNoticeBytes = 2048;

// Frames that carry `bytes` of payload: an empty message is one frame.
constexpr size_t frames_for(size_t bytes) {
  return bytes == 0 ? 1 : (bytes + kSegmentBytes - 1) / kSegmentBytes;
}

}  // namespace pycomm
