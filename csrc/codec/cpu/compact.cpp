// Compact packets on the CPU: the header, the choice of the smallest index code, and the values.
// Blocks of values are independent, so that the caller can code them on several threads; what was
// sent is known while a block is in the cache.
#include "codec/compact.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>

#include "codec/cpu/index_codes.h"
#include "codec/cpu/indices.h"
#include "codec/cpu/value_codes.h"
#include "codec/cpu/varint.h"
#include "core/errors.h"
#include "cpu/floats.h"
#include "cpu/isa.h"

namespace pycomm::codec {
namespace {

constexpr size_t kValuesPerTask = 8 * kValueBlock;

[[noreturn]] void refuse(const std::string& why, size_t bytes) {
  throw InvalidArgument("invalid packet: " + why + " (" + std::to_string(bytes) + " bytes)");
}

std::byte* write_head(const CompactGroups& groups, IndexCode index_code, ValueCode value_code,
                      std::byte* out) {
  const CompactHead head =
      compact_head(groups.indices.size(), groups.count, groups.group, index_code, value_code);
  return std::copy_n(head.bytes.data(), head.size, out);
}

struct OneNan {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(float* values, size_t n) {
    for (size_t i = 0; i < n; ++i) values[i] = cpu::with_one_nan(values[i]);
  }
};

// Values from `first` on, which share levels.
void write_block(ValueCode code, const BlockValues& values, size_t first, size_t n,
                 std::byte* out) {
  alignas(64) std::array<float, kValueBlock> own, decoded;
  values.read(first, std::span(own).first(n));
  cpu::run_on<OneNan>(cpu::isa_here(), own.data(), n);
  write_values(code, std::span(own).first(n), out);
  if (!values.wants_sent()) return;
  read_values(code, out, std::span(decoded).first(n));
  values.sent(first, std::span(own).first(n), std::span(decoded).first(n));
}

}  // namespace

bool is_compact(std::span<const std::byte> bytes) {
  return bytes.size() >= 2 && std::memcmp(bytes.data(), kCompactMagic.data(), 2) == 0;
}

CompactHeader read_compact_header(std::span<const std::byte> bytes, size_t size) {
  if (!is_compact(bytes)) refuse("its magic word is invalid", size);
  if (bytes.size() < kCompactMagic.size() + 4) refuse("it is shorter than its header", size);
  if (std::memcmp(bytes.data(), kCompactMagic.data(), kCompactMagic.size()) != 0)
    refuse("its version is unknown", size);
  size_t at = kCompactMagic.size();
  const auto codes = std::to_integer<unsigned>(bytes[at++]);
  if (codes % 16 >= kIndexCodes.size() || codes / 16 >= kValueCodes.size())
    refuse("its codec is unknown", size);
  const auto bits = std::to_integer<unsigned>(bytes[at++]);
  if (bits >= std::bit_width(kMostGroup)) refuse("its group is too large", size);
  const auto k = read_varint(bytes, at), count = read_varint(bytes, at);
  if (!k || !count || *k > *count) refuse("its k or count is out of range", size);
  const CompactHeader header{.index_code = static_cast<IndexCode>(codes % 16),
                             .value_code = static_cast<ValueCode>(codes / 16),
                             .group = size_t{1} << bits,
                             .k = *k,
                             .count = *count,
                             .bytes = at};
  const size_t least = at + value_bytes(header.value_code, header.values());
  if (size < least + least_index_bytes(header.index_code, *k, *count) ||
      size > least + most_index_bytes(header.index_code, *k, *count))
    refuse("its length does not match k = " + std::to_string(*k), size);
  return header;
}

size_t most_compact_bytes(size_t k, size_t count, size_t group, const CompactCodes& codes) {
  const IndexCode code = codes.automatic ? IndexCode::list : codes.index_code;
  return kMostHead + value_bytes(codes.value_code, k * group) + most_index_bytes(code, k, count);
}

size_t encode_compact(const CompactGroups& groups, const CompactCodes& codes,
                      const BlockValues& values, std::byte* out, const RunTasks& run) {
  check_indices(groups.indices, groups.count);
  const size_t all = groups.indices.size() * groups.group;
  // The size of the head does not depend on the index code.
  std::byte* const begin = write_head(groups, IndexCode::list, codes.value_code, out);
  std::byte* const places = begin + value_bytes(codes.value_code, all);
  std::byte* end = places;
  run((all + kValuesPerTask - 1) / kValuesPerTask + 1, [&](size_t task) {
    const cpu::ExactFloats exact;
    if (task == 0) {
      if (groups.indices.size() == groups.count) return;
      const IndexPlan plan =
          plan_indices(groups.indices, groups.count,
                       codes.automatic ? std::nullopt : std::optional(codes.index_code));
      write_head(groups, plan.code, codes.value_code, out);
      end = write_indices(groups.indices, groups.count, plan, places);
      return;
    }
    const size_t stop = std::min(all, task * kValuesPerTask);
    for (size_t first = (task - 1) * kValuesPerTask; first < stop; first += kValueBlock)
      write_block(codes.value_code, values, first, std::min(kValueBlock, stop - first),
                  begin + value_bytes(codes.value_code, first));
  });
  return static_cast<size_t>(end - out);
}

PacketReader::PacketReader(std::span<const std::byte> bytes)
    : bytes_(bytes), header_(read_compact_header(bytes)) {
  const size_t coded = value_bytes(header_.value_code, header_.values());
  if (!values_end_in_zeros(header_.value_code, bytes.subspan(header_.bytes, coded),
                           header_.values()))
    refuse("bits after its last value are not zero", bytes.size());
}

void PacketReader::read_indices(int32_t* indices) const {
  if (header_.k == header_.count) {
    std::iota(indices, indices + header_.k, 0);
    return;
  }
  const size_t begin = header_.bytes + value_bytes(header_.value_code, header_.values());
  codec::read_indices(header_.index_code, bytes_.subspan(begin), header_.count,
                      {indices, header_.k});
}

void PacketReader::read_values(size_t first, std::span<float> values) const {
  for (size_t i = 0; i < values.size(); i += kValueBlock)
    codec::read_values(header_.value_code,
                       bytes_.data() + header_.bytes + value_bytes(header_.value_code, first + i),
                       values.subspan(i, std::min(kValueBlock, values.size() - i)));
}

}  // namespace pycomm::codec
