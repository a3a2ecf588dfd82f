// Compact packets: DeviceKernels on the codec.
#include "codec/compact.h"

#include <string>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace pycomm::kernels {

void CpuKernels::encode_compact(const codec::Packet& packet, const codec::CompactEncoding& encoding,
                                const CompactOutput& output, Queue) {
  *output.bytes = pycomm::codec::encode_compact(packet, encoding, output.out);
}

void CpuKernels::decode_compact(const CompactPacket& packet, const CompactArrays& to, Queue) {
  const codec::CompactHeader header = codec::read_compact_header(packet.bytes);
  if (header.k != packet.k || header.count != packet.count)
    throw InvalidArgument("invalid packet: got k = " + std::to_string(header.k) + " of " +
                          std::to_string(header.count) + " elements, expected k = " +
                          std::to_string(packet.k) + " of " + std::to_string(packet.count) + " (" +
                          std::to_string(packet.bytes.size()) + " bytes)");
  pycomm::codec::decode_compact(packet.bytes, to.indices, to.values);
  *to.refused = 0;
}

size_t CpuKernels::compact_workspace_bytes(size_t, size_t) { return 0; }

}  // namespace pycomm::kernels
