// The update step and its packets under the sanitizers: several threads, on the instruction sets of
// this machine. tests/unit/test_kernel_groups.py checks the results for every dtype.
//
// Arrays have the exact length and are separate, so that the sanitizer sees an access outside.
#include "kernels/groups.h"

#include <random>
#include <string>
#include <vector>

#include "codec/groups.h"
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
    return {table, Dtype::float32};
  }
  std::vector<Floats> values;
  std::vector<Array> table;
};

// A packet of the largest eighth of the groups of random updates.
std::vector<std::byte> packet_of(std::mt19937& random, const std::vector<uint64_t>& counts,
                                 codec::ValueCode code) {
  auto& all = cpu_kernels();
  std::normal_distribution<float> normal;
  Arrays theta(counts, 1), param(counts, 0), residual(counts, 0);
  std::vector<UpdatePiece> pieces;
  size_t groups = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (float& x : param.values[i]) x = normal(random);
    pieces.push_back({theta.values[i].data(), param.values[i].data(), residual.values[i].data(),
                      theta.values[i].size()});
    groups += groups_in(counts[i], kGroup);
  }
  const size_t k = groups / 8;
  std::vector<std::byte> packet(codec::most_group_bytes(k, groups, k * kGroup, code));
  std::vector<int32_t> indices(k);
  Floats values(k * kGroup);
  std::vector<uint64_t> sizes(2);
  std::vector<std::byte> workspace(all.group_workspace_bytes({counts.size(), groups, k}));
  all.update_step({.pieces = pieces,
                   .dtype = Dtype::float32,
                   .group = kGroup,
                   .k = k,
                   .value_code = code,
                   .indices = indices.data(),
                   .values = values.data(),
                   .packet = packet.data(),
                   .sizes = sizes.data(),
                   .workspace = {workspace.data(), workspace.size()}},
                  {});
  packet.resize(sizes[1]);
  packet.shrink_to_fit();
  return packet;
}

// The packets decoded to elements, and with their values decoded while they are added.
void decode_both_ways(const std::vector<uint64_t>& counts,
                      const std::vector<std::vector<std::byte>>& bytes, const std::string& where) {
  auto& all = cpu_kernels();
  std::vector<GroupPacket> packets;
  size_t groups = 0, count = 0;
  for (const auto& each : bytes) {
    const codec::GroupHeader header = codec::read_group_header(each);
    packets.push_back({each.data(), each.size(), header.k, header.values});
    groups += header.k;
    count += header.values;
  }
  std::vector<int32_t> elements(count), indices(groups);
  Floats values(count);
  std::vector<uint32_t> refused(bytes.size());
  all.decode_groups({.counts = counts,
                     .group = kGroup,
                     .packets = packets,
                     .elements = elements.data(),
                     .values = values.data(),
                     .refused = refused.data()},
                    {});
  read_group_indices(
      {.counts = counts, .group = kGroup, .packets = packets, .elements = indices.data()});
  std::vector<codec::Packet> decoded;
  std::vector<ReadGroups> read;
  size_t element = 0, group = 0;
  for (const GroupPacket& each : packets) {
    decoded.push_back({&elements[element], &values[element], each.values});
    read.push_back({each, &indices[group]});
    element += each.values;
    group += each.k;
  }
  Arrays sums(counts, 7), params(counts, 1), wanted_sums(counts, 7), wanted_params(counts, 1);
  all.decode_sum(wanted_sums.chain(), decoded, Dtype::float32, 0.5, {});
  all.decode_update(wanted_params.chain(), decoded, Dtype::float32, {.lr = 0.1, .scale = 0.5}, {});
  decode_group_sum(sums.chain(), read, kGroup, 0.5);
  decode_group_update(params.chain(), read, kGroup, {.lr = 0.1, .scale = 0.5});
  expect(sums.values == wanted_sums.values, where + ": other sums");
  expect(params.values == wanted_params.values, where + ": other parameters");
  const Arrays before = params;
  indices[groups - 1] = -1;
  expect_throws<InvalidArgument>(
      [&] { decode_group_update(params.chain(), read, kGroup, {.lr = 1, .scale = 1}); });
  expect(params.values == before.values, where + ": refused, but changed");
}

const Test kGroups("groups: packets decoded to elements, and while they are added", [] {
  const std::vector<uint64_t> counts{5, 0, 300'003, 1, 200'000, 17};
  on_each_isa([&](const std::string& where) {
    std::mt19937 random(6);
    std::vector<std::vector<std::byte>> packets;
    for (const auto code :
         {codec::ValueCode::one_bit, codec::ValueCode::three_bit, codec::ValueCode::bfloat16})
      packets.push_back(packet_of(random, counts, code));
    decode_both_ways(counts, packets, where);
  });
});

}  // namespace
