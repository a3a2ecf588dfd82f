// Compact packets: DeviceKernels on the codec.
#include "codec/compact.h"

#include <algorithm>
#include <string>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace pycomm::kernels {

void CpuKernels::encode_compact(const codec::Packet& packet, const codec::CompactEncoding& encoding,
                                const CompactOutput& output, Queue) {
  *output.bytes = pycomm::codec::encode_compact(packet, encoding, output.out);
}

void CpuKernels::decode_compact(std::span<const CompactPacket> packets, size_t count,
                                const CompactArrays& to, Queue) {
  size_t first = 0;
  for (const CompactPacket& packet : packets) {
    const std::span bytes(packet.bytes, packet.size);
    const codec::CompactHeader header = codec::read_compact_header(bytes);
    if (header.k != packet.k || header.count != count)
      throw InvalidArgument("invalid packet: got k = " + std::to_string(header.k) + " of " +
                            std::to_string(header.count) +
                            " elements, expected k = " + std::to_string(packet.k) + " of " +
                            std::to_string(count) + " (" + std::to_string(packet.size) + " bytes)");
    pycomm::codec::decode_compact(bytes, to.indices + first, to.values + first);
    first += packet.k;
  }
  std::fill_n(to.refused, packets.size(), 0);
}

size_t CpuKernels::compact_workspace_bytes(size_t, size_t) { return 0; }

}  // namespace pycomm::kernels
