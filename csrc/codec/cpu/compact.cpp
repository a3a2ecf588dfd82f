// Compact packets on the CPU: the header, the choice of the smallest index code, and the values.
// Values are coded block by block, so the residual is updated while the block is in the cache.
#include "codec/compact.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "codec/cpu/index_codes.h"
#include "codec/cpu/indices.h"
#include "codec/cpu/value_codes.h"
#include "codec/cpu/varint.h"
#include "codec/format.h"
#include "core/errors.h"
#include "core/visit_float.h"
#include "cpu/floats.h"

namespace pycomm::codec {
namespace {

// Writes the values, and their errors.
template <typename Real>
void write_all_values(const CompactSource& from, ValueCode code, std::byte* out) {
  const cpu::ExactFloats exact;
  const auto* const values = static_cast<const Real*>(from.values);
  auto* const errors = static_cast<Real*>(from.errors);
  std::array<float, kValueBlock> own, sent;
  for (size_t first = 0; first < from.k; first += kValueBlock) {
    const size_t n = std::min(kValueBlock, from.k - first);
    for (size_t i = 0; i < n; ++i)
      own[i] = cpu::with_one_nan(static_cast<float>(values[first + i]));
    write_values(code, std::span(own).first(n), out);
    if (errors != nullptr) {
      read_values(code, out, std::span(sent).first(n));
      for (size_t i = 0; i < n; ++i)
        errors[first + i] = cpu::with_one_nan(values[first + i] - static_cast<Real>(sent[i]));
    }
    out += value_bytes(code, n);
  }
}

[[noreturn]] void refuse(const std::string& why, size_t bytes) {
  throw InvalidArgument("invalid packet: " + why + " (" + std::to_string(bytes) + " bytes)");
}

}  // namespace

bool is_compact(std::span<const std::byte> bytes) {
  return bytes.size() >= 2 && std::memcmp(bytes.data(), kCompactMagic.data(), 2) == 0;
}

CompactHeader read_compact_header(std::span<const std::byte> bytes, size_t size) {
  if (!is_compact(bytes)) refuse("its magic word is invalid", size);
  if (bytes.size() < kCompactMagic.size() + 3) refuse("it is shorter than its header", size);
  if (std::memcmp(bytes.data(), kCompactMagic.data(), kCompactMagic.size()) != 0)
    refuse("its version is unknown", size);
  size_t at = kCompactMagic.size();
  const auto codes = std::to_integer<unsigned>(bytes[at++]);
  if (codes % 16 >= kIndexCodes.size() || codes / 16 >= kValueCodes.size())
    refuse("its codec is unknown", size);
  const auto k = read_varint(bytes, at), count = read_varint(bytes, at);
  if (!k || !count || *k > *count) refuse("its k or count is out of range", size);
  const CompactHeader header{static_cast<IndexCode>(codes % 16), static_cast<ValueCode>(codes / 16),
                             *k, *count, at};
  const size_t least = at + value_bytes(header.value_code, *k);
  if (size < least + least_index_bytes(header.index_code, *k, *count) ||
      size > least + most_index_bytes(header.index_code, *k, *count))
    refuse("its length does not match k = " + std::to_string(*k), size);
  return header;
}

size_t most_compact_bytes(size_t k, size_t count, const CompactCodes& codes) {
  const IndexCode code = codes.automatic ? IndexCode::list : codes.index_code;
  return kMostHead + value_bytes(codes.value_code, k) + most_index_bytes(code, k, count);
}

size_t encode_compact(const CompactSource& from, const CompactCodes& codes) {
  std::span indices(from.indices, from.k);
  std::vector<int32_t> shifted;
  if (from.first > 0) {
    shifted.resize(from.k);
    std::ranges::transform(indices, shifted.begin(), [&](int32_t index) {
      return static_cast<int32_t>(static_cast<uint32_t>(index) - static_cast<uint32_t>(from.first));
    });
    indices = shifted;
  }
  check_indices(indices, from.count);
  const std::optional<IndexCode> fixed =
      codes.automatic ? std::nullopt : std::optional(codes.index_code);
  const IndexPlan plan = plan_indices(indices, from.count, fixed);
  const CompactHead head = compact_head({from.k, from.count}, plan.code, codes.value_code);
  std::byte* at = std::copy_n(head.bytes.begin(), head.size, from.out);
  visit_real(codes.dtype, [&](auto dtype) {
    write_all_values<cpu::Stored<dtype()>>(from, codes.value_code, at);
  });
  at += value_bytes(codes.value_code, from.k);
  at = write_indices(indices, from.count, plan, at);
  return static_cast<size_t>(at - from.out);
}

void decode_compact(std::span<const std::byte> bytes, int32_t* indices, float* values) {
  const CompactHeader header = read_compact_header(bytes);
  const auto body = bytes.subspan(header.bytes);
  const auto coded = body.first(value_bytes(header.value_code, header.k));
  if (!values_end_in_zeros(header.value_code, coded, header.k))
    refuse("bits after its last value are not zero", bytes.size());
  read_indices(header.index_code, body.subspan(coded.size()), header.count, {indices, header.k});
  const cpu::ExactFloats exact;
  for (size_t first = 0; first < header.k; first += kValueBlock) {
    const size_t n = std::min(kValueBlock, header.k - first);
    read_values(header.value_code, coded.data() + value_bytes(header.value_code, first),
                {values + first, n});
  }
}

}  // namespace pycomm::codec
