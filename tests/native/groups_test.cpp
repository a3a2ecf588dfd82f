// The update step and its packets under the sanitizers: several threads, on the instruction sets of
// this machine. tests/unit/test_kernel_groups.py checks the results for every dtype.
//
// Arrays have the exact length and are separate, so that the sanitizer sees an access outside.
#include "kernels/groups.h"

#include <random>
#include <string>
#include <vector>

#include "codec/compact.h"
#include "harness.h"
#include "instruction_sets.h"
#include "kernels/device_kernels.h"
#include "kernels/group_batch.h"

namespace {

using namespace pycomm;
using namespace pycomm::kernels;

using Floats = std::vector<float>;
constexpr size_t kGroup = 16;

struct Arrays {
  Arrays(const std::vector<uint64_t>& counts, float value) {
    for (const size_t count : counts) values.emplace_back(count, value);
  }
  Chain chain() {
    table.clear();
    for (Floats& each : values) table.push_back({each.data(), each.size()});
    return {table, Dtype::float32, kGroup};
  }
  std::vector<Floats> values;
  std::vector<Array> table;
};

// A packet of the largest eighth of the groups of random updates.
std::vector<std::byte> packet_of(std::mt19937& random, const std::vector<uint64_t>& counts,
                                 size_t groups, codec::ValueCode code) {
  auto& all = cpu_kernels();
  std::normal_distribution<float> normal;
  Arrays theta(counts, 1), param(counts, 0), residual(counts, 0);
  std::vector<UpdatePiece> pieces;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (float& x : param.values[i]) x = normal(random);
    pieces.push_back({theta.values[i].data(), param.values[i].data(), residual.values[i].data(),
                      theta.values[i].size()});
  }
  const size_t k = groups / 8;
  const codec::CompactCodes codes{Dtype::float32, true, codec::IndexCode::list, code};
  std::vector<std::byte> packet(codec::most_compact_bytes(k, groups, kGroup, codes));
  std::vector<int32_t> indices(k);
  Floats sizes(k), values(k * kGroup);
  std::vector<std::byte> workspace(all.group_workspace_bytes({counts.size(), groups, k}));
  const Workspace room{workspace.data(), workspace.size()};
  all.update_step(pieces, Dtype::float32, {kGroup, k, indices.data(), sizes.data(), room}, {});
  const DeviceKernels::CompactSource source{indices.data(), values.data(), k, 0, groups,
                                            nullptr,        packet.data()};
  uint64_t bytes = 0;
  all.encode_compact({&source, 1}, {codes, kGroup, residual.chain().arrays}, {&bytes, {}}, {});
  packet.resize(bytes);
  packet.shrink_to_fit();
  return packet;
}

// The packets decoded to elements, and with their values decoded while they are added.
void decode_both_ways(const std::vector<uint64_t>& counts, size_t all_groups,
                      const std::vector<std::vector<std::byte>>& bytes, const std::string& where) {
  auto& all = cpu_kernels();
  std::vector<DeviceKernels::CompactPacket> packets;
  size_t groups = 0;
  for (const auto& each : bytes) {
    const size_t k = codec::read_compact_header(each).k;
    packets.push_back({each.data(), each.size(), k, 0, all_groups});
    groups += k;
  }
  std::vector<int32_t> elements(groups * kGroup), indices(groups);
  Floats values(elements.size());
  std::vector<uint32_t> refused(bytes.size());
  all.decode_compact(packets, {kGroup, elements.data(), values.data(), refused.data(), {}}, {});
  read_group_indices(packets, kGroup, indices.data());
  std::vector<codec::Packet> decoded;
  std::vector<ReadGroups> read;
  size_t group = 0;
  for (const auto& each : packets) {
    decoded.push_back({&elements[group * kGroup], &values[group * kGroup], each.k * kGroup});
    read.push_back({each, &indices[group]});
    group += each.k;
  }
  Arrays sums(counts, 7), params(counts, 1), wanted_sums(counts, 7), wanted_params(counts, 1);
  all.decode_sum(wanted_sums.chain(), decoded, Dtype::float32, 0.5, {});
  all.decode_update(wanted_params.chain(), decoded, Dtype::float32, {.lr = 0.1, .scale = 0.5}, {});
  decode_group_sum(sums.chain(), read, 0.5);
  decode_group_update(params.chain(), read, {.lr = 0.1, .scale = 0.5});
  expect(sums.values == wanted_sums.values, where + ": other sums");
  expect(params.values == wanted_params.values, where + ": other parameters");
  const Arrays before = params;
  indices[groups - 1] = -1;
  expect_throws<InvalidArgument>(
      [&] { decode_group_update(params.chain(), read, {.lr = 1, .scale = 1}); });
  expect(params.values == before.values, where + ": refused, but changed");
}

const Test kGroups("groups: packets decoded to elements, and while they are added", [] {
  const std::vector<uint64_t> counts{5, 0, 300'003, 1, 200'000, 17};
  size_t groups = 0;
  for (const size_t count : counts) groups += groups_in(count, kGroup);
  on_each_isa([&](const std::string& where) {
    std::mt19937 random(6);
    std::vector<std::vector<std::byte>> packets;
    for (const auto code :
         {codec::ValueCode::one_bit, codec::ValueCode::three_bit, codec::ValueCode::bfloat16})
      packets.push_back(packet_of(random, counts, groups, code));
    decode_both_ways(counts, groups, packets, where);
  });
});

}  // namespace
