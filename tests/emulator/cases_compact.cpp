// Compact packets compared with the CPU's: the same bytes, round trips, and arbitrary bytes, which
// both or neither refuse.
#include <numeric>

#include "cases.hpp"
#include "codec/compact.h"
#include "core/errors.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Bytes = std::vector<std::byte>;

struct Set {
  size_t count;
  std::vector<int32_t> indices;
  std::vector<float> values;
};

// k of `count`, most of them in every eighth part of the array.
Set set_of(std::mt19937& random, size_t count, size_t k) {
  std::vector<int32_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  std::stable_partition(all.begin(), all.end(), [&](int32_t i) { return i / 100 % 8 == 0; });
  all.resize(k);
  std::sort(all.begin(), all.end());
  return {count, all, numbers(random, k)};
}

std::string name_of(const Set& set, const codec::CompactEncoding& how) {
  return std::to_string(set.indices.size()) + " of " + std::to_string(set.count) + ", " +
         std::string(how.automatic ? "auto" : codec::kIndexCodes[size_t(how.index_code)]) + ", " +
         std::string(codec::kValueCodes[size_t(how.value_code)]);
}

Bytes encode_there(const Set& set, codec::CompactEncoding how, std::vector<float>& residual) {
  const size_t k = set.indices.size();
  Device<int32_t> indices(set.indices);
  Device<float> values(set.values), rest(residual);
  Device<std::byte> out(codec::most_compact_bytes(k, how), 1);
  Device<uint64_t> bytes(1);
  Device<std::byte> room(kernels().compact_workspace_bytes(k, 0));
  how.residual = rest.at();
  kernels().encode_compact({indices.at(), values.at(), k}, how,
                           {out.at(), bytes.at(), {room.at(), room.size()}}, queue());
  residual = rest.read();
  Bytes packet = out.read();
  packet.resize(bytes.read()[0]);
  return packet;
}

struct Decoded {
  bool refused = false;
  std::vector<int32_t> indices;
  std::vector<float> values;
};

Decoded decode_there(const Bytes& packet, size_t k, size_t count) {
  Device<std::byte> bytes(packet, 3);
  Device<int32_t> indices(k);
  Device<float> values(k);
  Device<uint32_t> refused(1);
  Device<std::byte> room(kernels().compact_workspace_bytes(k, packet.size()));
  const kernels::DeviceKernels::CompactPacket one{bytes.at(), packet.size(), k};
  kernels().decode_compact({&one, 1}, count,
                           {indices.at(), values.at(), refused.at(), {room.at(), room.size()}},
                           queue());
  return {refused.read()[0] != 0, indices.read(), values.read()};
}

Decoded decode_here(const Bytes& packet, size_t k, size_t count) {
  Decoded found{false, std::vector<int32_t>(k), std::vector<float>(k)};
  try {
    const codec::CompactHeader header = codec::read_compact_header(packet);
    found.refused = header.k != k || header.count != count;
    if (!found.refused) codec::decode_compact(packet, found.indices.data(), found.values.data());
  } catch (const InvalidArgument&) {
    found.refused = true;
  }
  if (found.refused) {
    std::fill(found.indices.begin(), found.indices.end(), -1);
    std::fill(found.values.begin(), found.values.end(), 0.0f);
  }
  return found;
}

void check_decoding(const Bytes& packet, size_t k, size_t count, const std::string& what) {
  const Decoded here = decode_here(packet, k, count), there = decode_there(packet, k, count);
  check(there.refused == here.refused, what + (here.refused ? " was not refused" : " was refused"));
  check(there.indices == here.indices, what + ": decoded indices");
  check(same_bits(there.values, here.values), what + ": decoded values");
}

void spoil(std::mt19937& random, Bytes packet, size_t k, size_t count, const std::string& what) {
  const size_t change = random() % 8;
  if (change == 0) packet.resize(packet.size() - 1 - random() % std::min<size_t>(packet.size(), 9));
  if (change == 1) packet.push_back(std::byte{0});
  const size_t from = change < 4 ? 0 : packet.size() / 2;
  for (size_t i = 0; i < 1 + random() % 3 && change > 1 && from < packet.size(); ++i)
    packet[from + random() % (packet.size() - from)] ^= static_cast<std::byte>(1 << random() % 8);
  check_decoding(packet, k, count, what + ", spoilt");
}

void try_set(std::mt19937& random, const Set& set, const codec::CompactEncoding& how, int spoilt) {
  const std::string what = name_of(set, how);
  const size_t k = set.indices.size();
  std::vector<float> here = numbers(random, set.count), there = here;
  codec::CompactEncoding own = how;
  own.residual = here.data();
  Bytes wanted(codec::most_compact_bytes(k, how));
  wanted.resize(
      codec::encode_compact({set.indices.data(), set.values.data(), k}, own, wanted.data()));
  check(encode_there(set, how, there) == wanted, what + ": other bytes");
  check(same_bits(here, there), what + ": another residual");
  check_decoding(wanted, k, set.count, what);
  for (int i = 0; i < spoilt; ++i) spoil(random, wanted, k, set.count, what);
}

}  // namespace

// Every packet that differs from a small one in one bit.
void run_compact_bits(std::mt19937& random) {
  for (const auto& [count, k] : {std::pair<size_t, size_t>{9, 4}, {90, 3}})
    for (const codec::IndexCode code :
         {codec::IndexCode::list, codec::IndexCode::bitmap, codec::IndexCode::rice}) {
      const Set set = set_of(random, count, k);
      const codec::ValueCode values =
          code == codec::IndexCode::list ? codec::ValueCode::three_bit : codec::ValueCode::one_bit;
      const codec::CompactEncoding how{count, Dtype::float32, false, code, values, nullptr};
      std::vector<float> rest(count);
      Bytes packet = encode_there(set, how, rest);
      for (size_t bit = 0; bit < 8 * packet.size(); ++bit) {
        packet[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
        check_decoding(packet, k, count, name_of(set, how) + ", bit " + std::to_string(bit));
        packet[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      }
    }
}

namespace {

void try_codes(std::mt19937& random, const Set& set, int spoilt) {
  for (size_t code = 0; code < codec::kValueCodes.size(); ++code) {
    codec::CompactEncoding how{
        set.count, Dtype::float32, true, codec::IndexCode::list, codec::ValueCode(code), nullptr};
    if (code > 0) {  // each index code beside each of two value codes is enough
      how.automatic = false;
      how.index_code = static_cast<codec::IndexCode>((code + set.indices.size()) % 3);
    }
    try_set(random, set, how, spoilt);
  }
}

// Indices that do not ascend within the array: no packet, and no change.
void try_wrong(std::mt19937& random) {
  for (const auto& indices : std::vector<std::vector<int32_t>>{{3, 3}, {4, 2}, {-1, 2}, {1, 90}}) {
    const Set set{90, indices, {1.0f, 2.0f}};
    const codec::CompactEncoding how{
        90, Dtype::float32, true, codec::IndexCode::list, codec::ValueCode::one_bit, nullptr};
    std::vector<float> residual = numbers(random, 90);
    const std::vector<float> before = residual;
    check(encode_there(set, how, residual).empty(), "wrong indices made a packet");
    check(same_bits(residual, before), "wrong indices changed the residual");
  }
}

}  // namespace

void run_compact(std::mt19937& random) {
  constexpr std::pair<size_t, size_t> kSets[] = {
      {1, 0}, {1, 1}, {70, 64}, {70, 65}, {9000, 63}, {6000, 128}, {9000, 2049}, {40000, 4100}};
  for (const auto& [count, k] : kSets) try_codes(random, set_of(random, count, k), 3);
  for (const size_t count : sizes({})) try_codes(random, set_of(random, count, count / 100), 1);
  try_wrong(random);
}

// For the slow sanitizers: two runs of the Rice code, and one that ends within a byte.
void run_compact_brief(std::mt19937& random) {
  const Set set = set_of(random, 50'000, 2113);
  for (const codec::ValueCode code : {codec::ValueCode::two_bit, codec::ValueCode::three_bit})
    try_set(random, set, {set.count, Dtype::float32, false, codec::IndexCode::rice, code, nullptr},
            2);
  const Set few = set_of(random, 900, 67);
  try_set(random, few,
          {few.count, Dtype::float32, false, codec::IndexCode::bitmap, codec::ValueCode::one_bit,
           nullptr},
          3);
  try_set(random, few,
          {few.count, Dtype::float32, false, codec::IndexCode::list, codec::ValueCode::bfloat16,
           nullptr},
          3);
}

namespace {

// Packets of many lengths and codes, some of them spoilt, at once: as each alone.
void try_batch(std::mt19937& random, const std::vector<size_t>& lengths) {
  constexpr size_t kCount = 5000;
  std::vector<Bytes> packets;
  Bytes all;
  std::vector<int32_t> indices;
  std::vector<float> values;
  std::vector<uint32_t> refused;
  for (const size_t k : lengths) {
    const Set set = set_of(random, kCount, k);
    const codec::CompactEncoding how{kCount,
                                     Dtype::float32,
                                     false,
                                     codec::IndexCode(random() % 3),
                                     codec::ValueCode(random() % 5),
                                     nullptr};
    Bytes packet(codec::most_compact_bytes(k, how));
    packet.resize(
        codec::encode_compact({set.indices.data(), set.values.data(), k}, how, packet.data()));
    if (random() % 4 == 0) packet[random() % packet.size()] ^= std::byte{4};
    const Decoded here = decode_here(packet, k, kCount);
    indices.insert(indices.end(), here.indices.begin(), here.indices.end());
    values.insert(values.end(), here.values.begin(), here.values.end());
    refused.push_back(here.refused);
    all.insert(all.end(), packet.begin(), packet.end());
    packets.push_back(packet);
  }
  const Device<std::byte> bytes(all);
  std::vector<kernels::DeviceKernels::CompactPacket> rows;
  size_t at = 0, room_bytes = 0;
  for (size_t i = 0; i < packets.size(); ++i) {
    rows.push_back({bytes.at() + at, packets[i].size(), lengths[i]});
    at += packets[i].size();
    room_bytes += kernels().compact_workspace_bytes(lengths[i], packets[i].size());
  }
  Device<int32_t> found(indices.size());
  Device<float> numbers_found(values.size());
  Device<uint32_t> verdicts(rows.size());
  Device<std::byte> room(room_bytes);
#ifndef ON_GPU
  const uint64_t before = emulator::traffic().launches;
#endif
  kernels().decode_compact(
      rows, kCount, {found.at(), numbers_found.at(), verdicts.at(), {room.at(), room.size()}},
      queue());
  finish();
#ifndef ON_GPU
  const uint64_t pages = (rows.size() + 127) / 128;
  check(emulator::traffic().launches - before == 7 * pages, "other launches");
#endif
  check(verdicts.read() == refused, "other packets were refused");
  check(found.read() == indices, "a batch gave other indices");
  check(same_bits(numbers_found.read(), values), "a batch gave other values");
}

}  // namespace

void run_compact_batch(std::mt19937& random) {
  try_batch(random, {130, 0, 1, 64, 700, 65, 2113, 3});
  std::vector<size_t> many;
  for (size_t i = 0; i < 150; ++i) many.push_back(random() % 40);
  try_batch(random, many);
}

// Captured once, replayed with other numbers in the same places.
void run_compact_graph(std::mt19937& random) {
  constexpr size_t kCount = 3000, kEach = 200;
  const codec::CompactEncoding how{
      kCount, Dtype::float32, true, codec::IndexCode::list, codec::ValueCode::two_bit, nullptr};
  Device<int32_t> indices(kEach), found(kEach);
  Device<float> values(kEach), numbers_found(kEach);
  const size_t most = codec::most_compact_bytes(kEach, how);
  Device<std::byte> out(most), room(kernels().compact_workspace_bytes(kEach, most));
  Device<uint64_t> bytes(1);
  Device<uint32_t> refused(1);
  const size_t length =
      [&] {  // that of the first set: a captured decoder knows its packet's length
        const Set set = set_of(random, kCount, kEach);
        std::vector<float> rest(kCount);
        return encode_there(set, how, rest).size();
      }();
  check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  kernels().encode_compact({indices.at(), values.at(), kEach}, how,
                           {out.at(), bytes.at(), {room.at(), room.size()}}, queue());
  const kernels::DeviceKernels::CompactPacket one{out.at(), length, kEach};
  kernels().decode_compact({&one, 1}, kCount,
                           {found.at(), numbers_found.at(), refused.at(), {room.at(), room.size()}},
                           queue());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  check_cuda(cudaStreamEndCapture(stream(), &graph));
  check_cuda(cudaGraphInstantiate(&made, graph, 0));
  for (int replay = 0; replay < 4; ++replay) {
    const Set set = set_of(random, kCount, kEach);
    indices.write(set.indices);
    values.write(set.values);
    check_cuda(cudaGraphLaunch(made, stream()));
    Bytes wanted(most);
    wanted.resize(
        codec::encode_compact({set.indices.data(), set.values.data(), kEach}, how, wanted.data()));
    Bytes packet = out.read();
    packet.resize(bytes.read()[0]);
    check(packet == wanted, "a replay wrote other bytes");
    check((refused.read()[0] == 0) == (wanted.size() == length), "a replay used another length");
    if (wanted.size() == length) check(found.read() == set.indices, "a replay read other indices");
  }
  check_cuda(cudaGraphExecDestroy(made));
  check_cuda(cudaGraphDestroy(graph));
}

}  // namespace cases
