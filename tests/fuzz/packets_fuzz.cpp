// Encoded packets, raw and compact, as they arrive from other ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/compact.h"
#include "codec/cpu/indices.h"
#include "codec/packet.h"
#include "core/errors.h"
#include "cpu/floats.h"
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
      : reader(bytes), header(reader.header()), indices(header.k), values(header.values()) {
    reader.read_indices(indices.data());
    const cpu::ExactFloats exact;
    reader.read_values(0, values);
  }
  codec::PacketReader reader;
  codec::CompactHeader header;
  std::vector<int32_t> indices;
  std::vector<float> values;
};

class Values final : public codec::BlockValues {
 public:
  explicit Values(std::span<const float> all) : all_(all) {}
  void read(size_t first, std::span<float> values) const override {
    std::ranges::copy(all_.subspan(first, values.size()), values.begin());
  }
  void sent(size_t, std::span<const float>, std::span<float>) const override {}

 private:
  std::span<const float> all_;
};

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void read_compact(std::span<const std::byte> bytes) {
  fuzz::demand(codec::read_compact_header(bytes).values() <= 8 * bytes.size(),
               "a packet of more values than bits");
  const Decoded first(bytes);
  const codec::CompactHeader& header = first.header;
  demand_sound(first.indices, header.count);
  const cpu::ExactFloats exact;
  std::vector<float> block;
  for (size_t at = 0; at < first.values.size(); at += block.size()) {
    block.resize(std::min(codec::kValueBlock, first.values.size() - at));
    first.reader.read_values(at, block);
    fuzz::demand(std::memcmp(block.data(), &first.values[at], block.size() * sizeof(float)) == 0,
                 "a block by itself has other values");
  }
  if (header.count > kMostCount || header.values() > kMostCount) return;
  const codec::CompactCodes codes{Dtype::float32, false, header.index_code,
                                  codec::ValueCode::float32};
  std::vector<std::byte> again(
      codec::most_compact_bytes(header.k, header.count, header.group, codes));
  const auto run = [](size_t tasks, const auto& task) {
    for (size_t i = 0; i < tasks; ++i) task(i);
  };
  again.resize(codec::encode_compact({first.indices, header.count, header.group}, codes,
                                     Values(first.values), again.data(), run));
  const Decoded second(again);
  fuzz::demand(second.indices == first.indices, "indices come back as others");
  fuzz::demand(std::ranges::equal(second.values, first.values, same), "values come back as others");
}

}  // namespace

void fuzz::one(Input input) {
  // Where an array of a packet may begin, with the address sanitizer right behind its end.
  const auto own = std::make_unique<std::byte[]>(input.size());
  std::copy(input.begin(), input.end(), own.get());
  const std::span<const std::byte> bytes(own.get(), input.size());
  try {
    if (codec::is_compact(bytes)) return read_compact(bytes);
    read_raw(bytes);
  } catch (const InvalidArgument&) {
  }
}
