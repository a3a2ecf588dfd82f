// Compact packets on the CPU: the header, the choice of the smallest index code, and the values.
// Values are coded block by block, so the residual is updated while the block is in the cache.
#include "codec/compact.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

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

// Writes the values, and adds their rounding errors to the residual.
template <typename Real>
void write_all_values(const Packet& packet, const CompactEncoding& encoding, std::byte* out) {
  const cpu::ExactFloats exact;
  const auto* const values = static_cast<const Real*>(packet.values);
  auto* const residual = static_cast<Real*>(encoding.residual);
  std::array<float, kValueBlock> own, sent;
  for (size_t first = 0; first < packet.count; first += kValueBlock) {
    const size_t n = std::min(kValueBlock, packet.count - first);
    for (size_t i = 0; i < n; ++i)
      own[i] = cpu::with_one_nan(static_cast<float>(values[first + i]));
    write_values(encoding.value_code, std::span(own).first(n), out);
    if (residual != nullptr) {
      read_values(encoding.value_code, out, std::span(sent).first(n));
      for (size_t i = 0; i < n; ++i) {
        Real& rest = residual[packet.indices[first + i]];
        rest = cpu::with_one_nan(rest + (values[first + i] - static_cast<Real>(sent[i])));
      }
    }
    out += value_bytes(encoding.value_code, n);
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

size_t most_compact_bytes(size_t k, const CompactEncoding& encoding) {
  const IndexCode code = encoding.automatic ? IndexCode::list : encoding.index_code;
  return kMostHead + value_bytes(encoding.value_code, k) +
         most_index_bytes(code, k, encoding.count);
}

size_t encode_compact(const Packet& packet, const CompactEncoding& encoding, std::byte* out) {
  const std::span indices(packet.indices, packet.count);
  check_indices(indices, encoding.count);
  const std::optional<IndexCode> fixed =
      encoding.automatic ? std::nullopt : std::optional(encoding.index_code);
  const IndexPlan plan = plan_indices(indices, encoding.count, fixed);
  const CompactHead head =
      compact_head({packet.count, encoding.count}, plan.code, encoding.value_code);
  std::byte* at = std::copy_n(head.bytes.begin(), head.size, out);
  visit_real(encoding.dtype,
             [&](auto dtype) { write_all_values<cpu::Stored<dtype()>>(packet, encoding, at); });
  at += value_bytes(encoding.value_code, packet.count);
  at = write_indices(indices, encoding.count, plan, at);
  return static_cast<size_t>(at - out);
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
