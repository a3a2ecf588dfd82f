// Compact packets that a call names, and the elements of their groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>

#include "codec/compact.h"
#include "core/errors.h"
#include "kernels/device_kernels.h"

namespace pycomm::kernels {

// Throws InvalidArgument unless it is a packet with these numbers.
inline codec::PacketReader reader_of(const DeviceKernels::CompactPacket& packet, size_t group) {
  const codec::PacketReader reader({packet.bytes, packet.size});
  const codec::CompactHeader& header = reader.header();
  const auto named = [](size_t k, size_t count, size_t of) {
    return "k = " + std::to_string(k) + " of " + std::to_string(count) +
           (of == 1 ? " elements" : " groups of " + std::to_string(of));
  };
  if (header.k != packet.k || header.count != packet.count || header.group != group)
    throw InvalidArgument("invalid packet: got " + named(header.k, header.count, header.group) +
                          ", expected " + named(packet.k, packet.count, group) + " (" +
                          std::to_string(packet.size) + " bytes)");
  return reader;
}

// Writes the positions of the elements of a group in a Chain of this group.
inline void expand_group(size_t number, size_t group, int32_t* elements) {
  std::iota(elements, elements + group, static_cast<int32_t>(number * group));
}

}  // namespace pycomm::kernels
