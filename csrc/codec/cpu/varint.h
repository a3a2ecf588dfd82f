// Reads the varints of a packet's header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "codec/format.h"

namespace pycomm::codec {

// Returns nothing if the varint does not end, is longer than necessary, or is 2^31 or more.
inline std::optional<size_t> read_varint(std::span<const std::byte> bytes, size_t& at) {
  uint64_t number = 0;
  for (size_t i = 0; i < kMostVarint && at < bytes.size(); ++i) {
    const auto byte = std::to_integer<uint64_t>(bytes[at++]);
    number |= (byte & 0x7f) << 7 * i;
    if (byte >= 0x80) continue;
    if ((byte == 0 && i > 0) || number >> 31 != 0) return {};
    return number;
  }
  return {};
}

}  // namespace pycomm::codec
