// Compact packets: DeviceKernels on the codec.
#include "codec/compact.h"

#include <string>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"

namespace pycomm::cpu {

void CpuKernels::encode_compact(const Packet& packet, const CompactEncoding& encoding,
                                const CompactOutput& out, Queue) {
  *out.bytes = pycomm::encode_compact(packet, encoding, out.out);
}

void CpuKernels::decode_compact(const CompactPacket& packet, const CompactArrays& to, Queue) {
  const CompactHeader header = read_compact_header(packet.bytes);
  if (header.k != packet.k || header.count != packet.count)
    throw InvalidArgument("not a packet: " + std::to_string(header.k) + " of " +
                          std::to_string(header.count) + " elements and not " +
                          std::to_string(packet.k) + " of " + std::to_string(packet.count) + " (" +
                          std::to_string(packet.bytes.size()) + " bytes)");
  pycomm::decode_compact(packet.bytes, to.indices, to.values);
  *to.refused = 0;
}

size_t CpuKernels::compact_workspace_bytes(size_t, size_t) { return 0; }

}  // namespace pycomm::cpu
