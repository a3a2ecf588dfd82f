#include "kernels/group_batch.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "codec/compact.h"
#include "codec/cpu/indices.h"
#include "codec/packet.h"
#include "kernels/cpu/compact_reader.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

static_assert(kRange % kMostGroup == 0);

// Packets of groups for sums.h.
class GroupPackets {
 public:
  static constexpr size_t kRangesPerTask = 8;  // so few that their values fit in the cache
  static constexpr bool kGroups = true;

  // Throws InvalidArgument unless these are packets and groups of the arrays.
  GroupPackets(const Chain& chain, std::span<const ReadGroups> packets) : group_(chain.group) {
    size_t groups = 0;
    for (const Array& array : chain.arrays) groups += groups_in(array.count, group_);
    for (const ReadGroups& each : packets) {
      const codec::PacketReader reader = reader_of(each.packet, group_);
      const std::span indices(each.indices, each.packet.k);
      codec::check_indices(indices, groups);
      packets_.push_back({reader, indices});
    }
  }
  template <typename F>
  void visit_values(F&& f) const {
    f(std::integral_constant<Dtype, Dtype::float32>());
  }
  template <typename F>
  void with_packets(size_t begin, size_t end, F&& f) const {
    std::unique_ptr<Buffers> buffers = take();
    f(decode(begin, end, *buffers));
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffers));
  }

 private:
  struct Packet {
    codec::PacketReader reader;
    std::span<const int32_t> indices;
  };
  // Of a thread.
  struct Buffers {
    std::vector<float> values;
    std::vector<codec::Packet> packets;
  };
  // Neighbours among the selected groups, and where their values are in the packet. The buffer of
  // values begins with the block of the first one and ends with the block of the last one.
  struct Part {
    std::span<const int32_t> groups;
    size_t first_value, end_value;
    size_t buffer_begin = 0, buffer_end = 0;

    size_t buffered() const { return buffer_end - buffer_begin; }
  };

  std::unique_ptr<Buffers> take() const {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Buffers>();
    std::unique_ptr<Buffers> found = std::move(free_.back());
    free_.pop_back();
    return found;
  }

  Part part_of(const Packet& packet, int64_t first, int64_t end) const {
    const auto& indices = packet.indices;
    const auto begin = std::ranges::lower_bound(indices, first) - indices.begin();
    const auto stop = std::ranges::lower_bound(indices, end) - indices.begin();
    const auto from = static_cast<size_t>(begin), to = static_cast<size_t>(stop);
    Part part{.groups = indices.subspan(from, to - from),
              .first_value = from * group_,
              .end_value = to * group_};
    if (part.groups.empty()) return part;
    constexpr size_t kBlock = codec::kValueBlock;
    part.buffer_begin = part.first_value / kBlock * kBlock;
    part.buffer_end =
        std::min((part.end_value + kBlock - 1) / kBlock * kBlock, packet.reader.header().values());
    return part;
  }

  // The elements in begin..end-1, where arrays or ranges begin and end.
  std::span<const codec::Packet> decode(size_t begin, size_t end, Buffers& to) const {
    const auto first = static_cast<int64_t>(begin / group_);
    const auto stop = static_cast<int64_t>(groups_in(end, group_));
    std::vector<Part> parts;
    size_t values = 0;
    for (const Packet& packet : packets_) {
      parts.push_back(part_of(packet, first, stop));
      values += parts.back().buffered();
    }
    if (to.values.size() < values) to.values.resize(values);
    to.packets.clear();
    float* value = to.values.data();
    for (size_t p = 0; p < parts.size(); ++p) {
      const Part& part = parts[p];
      packets_[p].reader.read_values(part.buffer_begin, {value, part.buffered()});
      to.packets.push_back(
          {part.groups.data(), value + (part.first_value - part.buffer_begin), part.groups.size()});
      value += part.buffered();
    }
    return to.packets;
  }

  size_t group_;
  std::vector<Packet> packets_;
  mutable std::mutex mutex_;  // guards free_
  mutable std::vector<std::unique_ptr<Buffers>> free_;
};

}  // namespace

void read_group_indices(std::span<const DeviceKernels::CompactPacket> packets, size_t group,
                        int32_t* indices) {
  std::vector<int32_t*> begins{indices};
  for (const auto& packet : packets) begins.push_back(begins.back() + packet.k);
  parallel_or_throw(packets.size(), [&](size_t p) {
    reader_of(packets[p], group).read_indices(begins[p]);
    for (int32_t& index : std::span(begins[p], packets[p].k))
      index += static_cast<int32_t>(packets[p].first);
  });
}

void decode_group_sum(const Chain& out, std::span<const ReadGroups> packets, double scale) {
  store_sums(out, GroupPackets(out, packets), scale);
}

void decode_group_update(const Chain& param, std::span<const ReadGroups> packets,
                         DeviceKernels::Update update) {
  apply_sums(param, GroupPackets(param, packets), update);
}

}  // namespace pycomm::kernels
