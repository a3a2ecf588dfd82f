// Compact packets: DeviceKernels on the codec.
#include "codec/compact.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/errors.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kSerial = size_t{1} << 15;  // elements that do not pay for waking threads

// Calls code(packet, elements before it) for each packet, on several threads if they pay.
template <typename Packet, typename F>
void each_packet(std::span<const Packet> packets, F&& code) {
  std::vector<size_t> begins{0};
  for (const Packet& packet : packets) begins.push_back(begins.back() + packet.k);
  const auto task = [&](size_t i) { code(i, begins[i]); };
  if (begins.back() >= kSerial && packets.size() > 1)
    return parallel_or_throw(packets.size(), task);
  for (size_t i = 0; i < packets.size(); ++i) task(i);
}

}  // namespace

void CpuKernels::encode_compact(std::span<const codec::CompactSource> sources,
                                const codec::CompactCodes& codes, const CompactSizes& to, Queue) {
  each_packet(sources, [&](size_t i, size_t) {
    to.sizes[i] = pycomm::codec::encode_compact(sources[i], codes);
  });
}

void CpuKernels::decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                                Queue) {
  each_packet(packets, [&](size_t i, size_t begin) {
    const CompactPacket& packet = packets[i];
    const std::span bytes(packet.bytes, packet.size);
    const codec::CompactHeader header = codec::read_compact_header(bytes);
    if (header.k != packet.k || header.count != packet.count)
      throw InvalidArgument(
          "invalid packet: got k = " + std::to_string(header.k) + " of " +
          std::to_string(header.count) + " elements, expected k = " + std::to_string(packet.k) +
          " of " + std::to_string(packet.count) + " (" + std::to_string(packet.size) + " bytes)");
    const std::span indices(to.indices + begin, packet.k);
    pycomm::codec::decode_compact(bytes, indices.data(), to.values + begin);
    for (int32_t& index : indices) index += static_cast<int32_t>(packet.first);
    to.refused[i] = 0;
  });
}

size_t CpuKernels::compact_encoding_bytes(std::span<const codec::CompactSource>) { return 0; }
size_t CpuKernels::compact_decoding_bytes(std::span<const CompactPacket>) { return 0; }

}  // namespace pycomm::kernels
