// Encoded packets, raw, compact and of groups, as they arrive from other ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/compact.h"
#include "codec/cpu/indices.h"
#include "codec/groups.h"
#include "codec/packet.h"
#include "core/errors.h"
#include "fuzz.h"

namespace {

using namespace pycomm;

constexpr size_t kMostCount = 1 << 16;  // of what is encoded again: a bitmap has as many bits

void demand_sound(std::span<const int32_t> indices, size_t count) {
  int64_t before = -1;
  for (const int32_t index : indices) {
    fuzz::demand(index > before && static_cast<size_t>(index) < count, "invalid indices");
    before = index;
  }
}

// Every byte that the kernels read of a packet with a valid header and valid indices.
void read_raw(std::span<const std::byte> bytes) {
  const codec::PacketHeader header = codec::read_packet_header(bytes);
  fuzz::demand(header.k <= bytes.size(), "a packet of more elements than bytes");
  std::vector<int32_t> indices(header.k);
  std::vector<std::byte> values(header.k * bytes_of(header.value_dtype));
  if (header.k == 0) return;
  std::memcpy(values.data(), bytes.data() + codec::kPacketHeaderBytes, values.size());
  std::memcpy(indices.data(),
              bytes.data() + codec::raw_indices_offset(header.k, header.value_dtype),
              indices.size() * sizeof(int32_t));
  codec::check_indices(indices, header.count);
  demand_sound(indices, header.count);
}

struct Decoded {
  explicit Decoded(std::span<const std::byte> bytes)
      : header(codec::read_compact_header(bytes)), indices(header.k), values(header.k) {
    codec::decode_compact(bytes, indices.data(), values.data());
  }
  codec::CompactHeader header;
  std::vector<int32_t> indices;
  std::vector<float> values;
};

void read_compact(std::span<const std::byte> bytes) {
  const codec::CompactHeader header = codec::read_compact_header(bytes);
  fuzz::demand(header.k <= 8 * bytes.size(), "a packet of more elements than bits");
  const Decoded first(bytes);
  demand_sound(first.indices, header.count);
  if (header.count > kMostCount) return;
  const codec::CompactCodes codes{Dtype::float32, false, header.index_code,
                                  codec::ValueCode::float32};
  std::vector<std::byte> again(codec::most_compact_bytes(header.k, header.count, codes));
  again.resize(codec::encode_compact(
      {first.indices.data(), first.values.data(), header.k, 0, header.count, nullptr, again.data()},
      codes));
  const Decoded second(again);
  fuzz::demand(second.indices == first.indices, "indices come back as others");
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  fuzz::demand(std::ranges::equal(second.values, first.values, same), "values come back as others");
}

void read_groups(std::span<const std::byte> bytes) {
  const codec::GroupHeader header = codec::read_group_header(bytes);
  fuzz::demand(header.values <= 8 * bytes.size(), "a packet of more values than bits");
  std::vector<int32_t> indices(header.k);
  std::vector<float> values(header.values);
  const codec::GroupReader reader(bytes);
  codec::decode_groups(reader, indices.data(), values.data(), [](size_t tasks, const auto& task) {
    for (size_t i = 0; i < tasks; ++i) task(i);
  });
  demand_sound(indices, header.count);
  std::vector<float> block;
  for (size_t first = 0; first < values.size(); first += block.size()) {
    block.resize(std::min(codec::kValueBlock, values.size() - first));
    reader.read_values(first, block);
    fuzz::demand(std::memcmp(block.data(), &values[first], block.size() * sizeof(float)) == 0,
                 "a block by itself has other values");
  }
}

}  // namespace

void fuzz::one(Input input) {
  // Where an array of a packet may begin, with the address sanitizer right behind its end.
  const auto own = std::make_unique<std::byte[]>(input.size());
  std::copy(input.begin(), input.end(), own.get());
  const std::span<const std::byte> bytes(own.get(), input.size());
  try {
    if (codec::is_compact(bytes))
      return bytes.size() > 2 && bytes[2] == std::byte{2} ? read_groups(bytes)
                                                          : read_compact(bytes);
    read_raw(bytes);
  } catch (const InvalidArgument&) {
  }
}
