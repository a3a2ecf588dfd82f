// Packets of groups on the CPU. Blocks of values are independent, so that the caller can code them
// on several threads.
#include "codec/groups.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <numeric>
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

constexpr size_t kBlocksPerTask = 8;

constexpr size_t kValuesPerTask = kBlocksPerTask * kValueBlock;

size_t tasks_of(size_t values) { return (values + kValuesPerTask - 1) / kValuesPerTask; }

// Calls f(first, n) for the blocks of values of a task.
template <typename F>
void each_block(size_t task, size_t values, F&& f) {
  const size_t end = std::min(values, (task + 1) * kValuesPerTask);
  for (size_t first = task * kValuesPerTask; first < end; first += kValueBlock)
    f(first, std::min(kValueBlock, end - first));
}

[[noreturn]] void refuse(const std::string& why, size_t bytes) {
  throw InvalidArgument("invalid packet of groups: " + why + " (" + std::to_string(bytes) +
                        " bytes)");
}

std::byte* write_head(const Groups& groups, IndexCode index_code, std::byte* out) {
  const CompactHead head = compact_head({groups.indices.size(), groups.count, groups.values},
                                        index_code, groups.value_code, kGroupMagic);
  return std::copy_n(head.bytes.data(), head.size, out);
}

// The lowest and highest size of the indices.
std::array<size_t, 2> index_bytes(IndexCode code, size_t k, size_t count) {
  if (k == count) return {0, 0};
  return {least_index_bytes(code, k, count), most_index_bytes(code, k, count)};
}

struct OneNan {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(float* values, size_t n) {
    for (size_t i = 0; i < n; ++i) values[i] = cpu::with_one_nan(values[i]);
  }
};

// sent = own - sent, or 0 if that is not finite.
struct Errors {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* own, size_t n, float* sent) {
    for (size_t i = 0; i < n; ++i) {
      const float error = own[i] - sent[i];
      sent[i] = cpu::is_finite(error) ? error : 0;
    }
  }
};

// Values from `first` on, which share levels.
void write_block(ValueCode code, const GroupValues& values, size_t first, size_t n,
                 std::byte* out) {
  const cpu::Isa isa = cpu::isa_here();
  alignas(64) std::array<float, kValueBlock> own, sent;
  values.read(first, std::span(own).first(n));
  cpu::run_on<OneNan>(isa, own.data(), n);
  write_values(code, std::span(own).first(n), out);
  read_values(code, out, std::span(sent).first(n));
  cpu::run_on<Errors, const float*>(isa, own.data(), n, sent.data());
  values.write_errors(first, std::span(sent).first(n));
}

}  // namespace

GroupHeader read_group_header(std::span<const std::byte> bytes, size_t size) {
  if (size < kGroupMagic.size() + 4) refuse("it is shorter than its header", size);
  if (std::memcmp(bytes.data(), kGroupMagic.data(), kGroupMagic.size()) != 0)
    refuse("its magic word or its version is unknown", size);
  size_t at = kGroupMagic.size();
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

size_t encode_groups(const Groups& groups, const GroupValues& values, std::byte* out,
                     const RunTasks& run) {
  check_indices(groups.indices, groups.count);
  // The size of the head does not depend on the index code.
  std::byte* const begin = write_head(groups, IndexCode::list, out);
  std::byte* const places = begin + value_bytes(groups.value_code, groups.values);
  std::byte* end = places;
  run(tasks_of(groups.values) + 1, [&](size_t task) {
    const cpu::ExactFloats exact;
    if (task == 0) {
      if (groups.indices.size() == groups.count) return;
      const IndexPlan plan = plan_indices(groups.indices, groups.count, std::nullopt);
      write_head(groups, plan.code, out);
      end = write_indices(groups.indices, groups.count, plan, places);
      return;
    }
    each_block(task - 1, groups.values, [&](size_t first, size_t n) {
      write_block(groups.value_code, values, first, n,
                  begin + value_bytes(groups.value_code, first));
    });
  });
  return static_cast<size_t>(end - out);
}

GroupReader::GroupReader(std::span<const std::byte> bytes)
    : bytes_(bytes), header_(read_group_header(bytes)) {
  const size_t coded = value_bytes(header_.value_code, header_.values);
  if (!values_end_in_zeros(header_.value_code, bytes.subspan(header_.bytes, coded), header_.values))
    refuse("bits after its last value are not zero", bytes.size());
}

void GroupReader::read_indices(int32_t* indices) const {
  if (header_.k == header_.count) {
    std::iota(indices, indices + header_.k, 0);
    return;
  }
  const size_t begin = header_.bytes + value_bytes(header_.value_code, header_.values);
  codec::read_indices(header_.index_code, bytes_.subspan(begin), header_.count,
                      {indices, header_.k});
}

void GroupReader::read_values(size_t first, std::span<float> values) const {
  for (size_t i = 0; i < values.size(); i += kValueBlock)
    codec::read_values(header_.value_code,
                       bytes_.data() + header_.bytes + value_bytes(header_.value_code, first + i),
                       values.subspan(i, std::min(kValueBlock, values.size() - i)));
}

void decode_groups(const GroupReader& packet, int32_t* indices, float* values,
                   const RunTasks& run) {
  const size_t count = packet.header().values;
  std::exception_ptr refused;
  run(tasks_of(count) + 1, [&](size_t task) {
    if (task > 0) {
      const cpu::ExactFloats exact;
      const size_t first = (task - 1) * kValuesPerTask;
      packet.read_values(first, {values + first, std::min(kValuesPerTask, count - first)});
      return;
    }
    try {
      packet.read_indices(indices);
    } catch (...) {  // tasks must not throw
      refused = std::current_exception();
    }
  });
  if (refused) std::rethrow_exception(refused);
}

}  // namespace pycomm::codec
