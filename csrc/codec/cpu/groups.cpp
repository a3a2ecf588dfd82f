// Packets of groups on the CPU. Blocks of values are independent, so that the caller can code them
// on several threads.
#include "codec/groups.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "codec/cpu/index_codes.h"
#include "codec/cpu/indices.h"
#include "codec/cpu/value_codes.h"
#include "codec/cpu/varint.h"
#include "core/errors.h"
#include "cpu/floats.h"

namespace pycomm::codec {
namespace {

constexpr std::array<char, 3> kMagic{'P', 'L', 2};
constexpr size_t kMostGroupHead = kMagic.size() + 1 + 3 * kMostVarint;
constexpr size_t kBlocksPerTask = 8;

[[noreturn]] void refuse(const std::string& why, size_t bytes) {
  throw InvalidArgument("invalid packet of groups: " + why + " (" + std::to_string(bytes) +
                        " bytes)");
}

std::byte* write_head(const Groups& groups, IndexCode index_code, std::byte* out) {
  const auto put = [&](size_t byte) { *out++ = static_cast<std::byte>(byte & 0xff); };
  for (const char letter : kMagic) put(static_cast<unsigned char>(letter));
  put(static_cast<size_t>(index_code) | static_cast<size_t>(groups.value_code) << 4);
  for (size_t number : {groups.indices.size(), groups.count, groups.values.size()}) {
    for (; number >= 0x80; number >>= 7) put((number & 0x7f) | 0x80);
    put(number);
  }
  return out;
}

// The lowest and highest size of the indices.
std::array<size_t, 2> index_bytes(IndexCode code, size_t k, size_t count) {
  if (k == count) return {0, 0};
  return {least_index_bytes(code, k, count), most_index_bytes(code, k, count)};
}

void write_block(ValueCode code, std::span<const float> values, float* errors, std::byte* out) {
  const cpu::ExactFloats exact;
  std::array<float, kValueBlock> own, sent;
  const size_t n = values.size();
  for (size_t i = 0; i < n; ++i) own[i] = cpu::with_one_nan(values[i]);
  write_values(code, std::span(own).first(n), out);
  read_values(code, out, std::span(sent).first(n));
  for (size_t i = 0; i < n; ++i) {
    const float error = own[i] - sent[i];
    errors[i] = cpu::is_finite(error) ? error : 0;
  }
}

}  // namespace

GroupHeader read_group_header(std::span<const std::byte> bytes) {
  const size_t size = bytes.size();
  if (size < kMagic.size() + 4) refuse("it is shorter than its header", size);
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    refuse("its magic word or its version is unknown", size);
  size_t at = kMagic.size();
  const auto codes = std::to_integer<unsigned>(bytes[at++]);
  if (codes % 16 >= kIndexCodes.size() || codes / 16 >= kValueCodes.size())
    refuse("its codec is unknown", size);
  const auto k = read_varint(bytes, at), count = read_varint(bytes, at);
  const auto values = read_varint(bytes, at);
  if (!k || !count || !values || *k > *count || *values < *k || (*k == 0 && *values > 0))
    refuse("its k, count or number of values is out of range", size);
  const GroupHeader header{.index_code = static_cast<IndexCode>(codes % 16),
                           .value_code = static_cast<ValueCode>(codes / 16),
                           .k = *k,
                           .count = *count,
                           .values = *values,
                           .bytes = at};
  const size_t least = at + value_bytes(header.value_code, *values);
  const auto [low, high] = index_bytes(header.index_code, *k, *count);
  if (size < least + low || size > least + high)
    refuse("its length does not match k = " + std::to_string(*k), size);
  return header;
}

size_t most_group_bytes(size_t k, size_t count, size_t values, ValueCode value_code) {
  return kMostGroupHead + value_bytes(value_code, values) +
         index_bytes(IndexCode::list, k, count)[1];
}

size_t encode_groups(const Groups& groups, float* errors, std::byte* out, const RunTasks& run) {
  check_indices(groups.indices, groups.count);
  const bool all = groups.indices.size() == groups.count;
  IndexPlan plan{IndexCode::list, {}};
  if (!all) plan = plan_indices(groups.indices, groups.count, std::nullopt);
  std::byte* const begin = write_head(groups, plan.code, out);
  const size_t count = groups.values.size(), each = kBlocksPerTask * kValueBlock;
  run((count + each - 1) / each, [&](size_t task) {
    const size_t end = std::min(count, (task + 1) * each);
    for (size_t first = task * each; first < end; first += kValueBlock)
      write_block(groups.value_code,
                  groups.values.subspan(first, std::min(kValueBlock, end - first)), errors + first,
                  begin + value_bytes(groups.value_code, first));
  });
  std::byte* at = begin + value_bytes(groups.value_code, count);
  if (!all) at = write_indices(groups.indices, groups.count, plan, at);
  return static_cast<size_t>(at - out);
}

void decode_groups(std::span<const std::byte> bytes, int32_t* indices, float* values) {
  const GroupHeader header = read_group_header(bytes);
  const auto body = bytes.subspan(header.bytes);
  const auto coded = body.first(value_bytes(header.value_code, header.values));
  if (!values_end_in_zeros(header.value_code, coded, header.values))
    refuse("bits after its last value are not zero", bytes.size());
  if (header.k == header.count)
    for (size_t i = 0; i < header.k; ++i) indices[i] = static_cast<int32_t>(i);
  else
    read_indices(header.index_code, body.subspan(coded.size()), header.count, {indices, header.k});
  const cpu::ExactFloats exact;
  for (size_t first = 0; first < header.values; first += kValueBlock) {
    const size_t n = std::min(kValueBlock, header.values - first);
    read_values(header.value_code, coded.data() + value_bytes(header.value_code, first),
                {values + first, n});
  }
}

}  // namespace pycomm::codec
