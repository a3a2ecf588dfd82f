// Compact packets compared with the CPU's: the same bytes, round trips, and arbitrary bytes, which
// both or neither refuse.
#include <numeric>

#include "cases.hpp"
#include "codec/compact.h"
#include "core/errors.h"
#include "kernels/device_kernels.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

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

using Source = kernels::DeviceKernels::CompactSource;

size_t most_bytes(size_t k, size_t count, const codec::CompactCodes& how) {
  return codec::most_compact_bytes(k, count, 1, how);
}

Bytes encode_here(const Set& set, const codec::CompactCodes& how, float* errors = nullptr) {
  const size_t k = set.indices.size();
  Bytes packet(most_bytes(k, set.count, how));
  Floats values = set.values;
  const Source source{set.indices.data(), values.data(), k, 0, set.count, errors, packet.data()};
  uint64_t bytes = 0;
  kernels::cpu_kernels().encode_compact({&source, 1}, {how, 1, {}}, {&bytes, {}}, {});
  packet.resize(bytes);
  return packet;
}

std::string name_of(const Set& set, const codec::CompactCodes& how) {
  return std::to_string(set.indices.size()) + " of " + std::to_string(set.count) + ", " +
         std::string(how.automatic ? "auto" : codec::kIndexCodes[size_t(how.index_code)]) + ", " +
         std::string(codec::kValueCodes[size_t(how.value_code)]);
}

Bytes encode_there(const Set& set, const codec::CompactCodes& how, std::vector<float>& errors) {
  const size_t k = set.indices.size();
  Device<int32_t> indices(set.indices);
  Device<float> values(set.values), lost(errors);
  Device<std::byte> out(most_bytes(k, set.count, how), 1);
  Device<uint64_t> bytes(1);
  const Source one{indices.at(), values.at(), k, 0, set.count, lost.at(), out.at()};
  Device<std::byte> room(kernels().compact_encoding_bytes({&one, 1}, {how, 1, {}}));
  kernels().encode_compact({&one, 1}, {how, 1, {}}, {bytes.at(), {room.at(), room.size()}},
                           queue());
  errors = lost.read();
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
  const kernels::DeviceKernels::CompactPacket one{bytes.at(), packet.size(), k, 0, count};
  Device<std::byte> room(kernels().compact_decoding_bytes({&one, 1}, 1));
  kernels().decode_compact(
      {&one, 1}, {1, indices.at(), values.at(), refused.at(), {room.at(), room.size()}}, queue());
  return {refused.read()[0] != 0, indices.read(), values.read()};
}

Decoded decode_here(const Bytes& packet, size_t k, size_t count) {
  Decoded found{false, std::vector<int32_t>(k), std::vector<float>(k)};
  const kernels::DeviceKernels::CompactPacket one{packet.data(), packet.size(), k, 0, count};
  uint32_t refused = 1;
  try {
    kernels::cpu_kernels().decode_compact(
        {&one, 1}, {1, found.indices.data(), found.values.data(), &refused, {}}, {});
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

void try_set(std::mt19937& random, const Set& set, const codec::CompactCodes& how, int spoilt) {
  const std::string what = name_of(set, how);
  const size_t k = set.indices.size();
  std::vector<float> here(k), there(k);
  const Bytes wanted = encode_here(set, how, here.data());
  check(encode_there(set, how, there) == wanted, what + ": other bytes");
  check(same_bits(here, there), what + ": other errors");
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
      const codec::CompactCodes how{Dtype::float32, false, code, values};
      Bytes packet = encode_here(set, how);
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
    codec::CompactCodes how{Dtype::float32, true, codec::IndexCode::list, codec::ValueCode(code)};
    if (code > 0) {  // each index code beside each of two value codes is enough
      how.automatic = false;
      how.index_code = static_cast<codec::IndexCode>((code + set.indices.size()) % 3);
    }
    try_set(random, set, how, spoilt);
  }
}

// Indices that do not ascend within the array: no packet, and errors that change no sum.
void try_wrong(std::mt19937& random) {
  for (const auto& indices : std::vector<std::vector<int32_t>>{{3, 3}, {4, 2}, {-1, 2}, {1, 90}}) {
    const Set set{90, indices, {1.0f, 2.0f}};
    const codec::CompactCodes how{Dtype::float32, true, codec::IndexCode::list,
                                  codec::ValueCode::one_bit};
    std::vector<float> errors = numbers(random, 2);
    check(encode_there(set, how, errors).empty(), "wrong indices made a packet");
    check(same_bits(errors, {-0.0f, -0.0f}), "wrong indices have errors");
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
    try_set(random, set, {Dtype::float32, false, codec::IndexCode::rice, code}, 2);
  const Set few = set_of(random, 900, 67);
  try_set(random, few, {Dtype::float32, false, codec::IndexCode::bitmap, codec::ValueCode::one_bit},
          3);
  try_set(random, few, {Dtype::float32, false, codec::IndexCode::list, codec::ValueCode::bfloat16},
          3);
}

namespace {

// Counts launches on the emulator.
class Launches {
 public:
#ifdef ON_GPU
  void check_equal(uint64_t) const {}
#else
  void check_equal(uint64_t wanted) const {
    check(emulator::traffic().launches - before_ == wanted, "other launches");
  }

 private:
  uint64_t before_ = emulator::traffic().launches;
#endif
};

// Packets of arrays that follow each other, of many lengths, written at once: as each alone.
void try_writing(std::mt19937& random, const std::vector<size_t>& lengths, bool automatic) {
  const codec::CompactCodes how{Dtype::float32, automatic, codec::IndexCode::bitmap,
                                codec::ValueCode::three_bit};
  std::vector<Bytes> wanted;
  std::vector<int32_t> indices;
  std::vector<float> values, errors;
  size_t most = 0;
  const size_t count = 5000;
  for (const size_t k : lengths) {
    const Set set = set_of(random, count, k);
    std::vector<float> lost(k);
    const auto first = static_cast<int32_t>(count * wanted.size());
    wanted.push_back(encode_here(set, how, lost.data()));
    for (const int32_t index : set.indices) indices.push_back(index + first);
    values.insert(values.end(), set.values.begin(), set.values.end());
    errors.insert(errors.end(), lost.begin(), lost.end());
    most = std::max(most, most_bytes(k, count, how));
  }
  const Device<int32_t> places(indices);
  Device<float> numbers_given(values);
  Device<float> lost(errors.size());
  Device<std::byte> out(most * lengths.size());
  Device<uint64_t> sizes(lengths.size());
  std::vector<Source> rows;
  size_t at = 0;
  for (const size_t k : lengths) {
    rows.push_back({places.at() + at, numbers_given.at() + at, k, count * rows.size(), count,
                    lost.at() + at, out.at() + most * rows.size()});
    at += k;
  }
  Device<std::byte> room(kernels().compact_encoding_bytes(rows, {how, 1, {}}));
  const Launches launches;
  kernels().encode_compact(rows, {how, 1, {}}, {sizes.at(), {room.at(), room.size()}}, queue());
  finish();
  launches.check_equal(5 * ((rows.size() + 127) / 128));
  const Bytes all = out.read();
  const std::vector<uint64_t> found = sizes.read();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(most * i);
    check(Bytes(begin, begin + static_cast<std::ptrdiff_t>(found[i])) == wanted[i],
          "a batch wrote other bytes");
  }
  check(same_bits(lost.read(), errors), "a batch has other errors");
}

// Packets of many lengths and codes, some of them spoilt, at once: as each alone.
void try_batch(std::mt19937& random, const std::vector<size_t>& lengths) {
  std::vector<Bytes> packets;
  Bytes all;
  std::vector<int32_t> indices;
  std::vector<float> values;
  std::vector<uint32_t> refused;
  const size_t count = 5000;
  for (const size_t k : lengths) {
    const codec::CompactCodes how{Dtype::float32, false, codec::IndexCode(random() % 3),
                                  codec::ValueCode(random() % 5)};
    Bytes packet = encode_here(set_of(random, count, k), how);
    if (random() % 4 == 0) packet[random() % packet.size()] ^= std::byte{4};
    const Decoded here = decode_here(packet, k, count);
    const auto first = static_cast<int32_t>(count * packets.size());
    for (const int32_t index : here.indices) indices.push_back(here.refused ? -1 : index + first);
    values.insert(values.end(), here.values.begin(), here.values.end());
    refused.push_back(here.refused);
    all.insert(all.end(), packet.begin(), packet.end());
    packets.push_back(packet);
  }
  const Device<std::byte> bytes(all);
  std::vector<kernels::DeviceKernels::CompactPacket> rows;
  size_t at = 0;
  for (size_t i = 0; i < packets.size(); ++i) {
    rows.push_back({bytes.at() + at, packets[i].size(), lengths[i], count * i, count});
    at += packets[i].size();
  }
  Device<int32_t> found(indices.size());
  Device<float> numbers_found(values.size());
  Device<uint32_t> verdicts(rows.size());
  Device<std::byte> room(kernels().compact_decoding_bytes(rows, 1));
  const Launches launches;
  kernels().decode_compact(
      rows, {1, found.at(), numbers_found.at(), verdicts.at(), {room.at(), room.size()}}, queue());
  finish();
  launches.check_equal(7 * ((rows.size() + 127) / 128));
  check(verdicts.read() == refused, "other packets were refused");
  check(found.read() == indices, "a batch gave other indices");
  check(same_bits(numbers_found.read(), values), "a batch gave other values");
}

}  // namespace

void run_compact_batch(std::mt19937& random) {
  std::vector<size_t> many;
  for (size_t i = 0; i < 150; ++i) many.push_back(random() % 40);
  for (const auto& lengths : {std::vector<size_t>{130, 0, 1, 64, 700, 65, 2113, 3}, many}) {
    try_writing(random, lengths, lengths.size() > 100);
    try_batch(random, lengths);
  }
}

// Captured once, replayed with other numbers in the same places.
void run_compact_graph(std::mt19937& random) {
  constexpr size_t kCount = 3000, kEach = 200;
  const codec::CompactCodes how{Dtype::float32, true, codec::IndexCode::list,
                                codec::ValueCode::two_bit};
  Device<int32_t> indices(kEach), found(kEach);
  Device<float> values(kEach), numbers_found(kEach);
  const size_t most = most_bytes(kEach, kCount, how);
  Device<std::byte> out(most);
  Device<uint64_t> bytes(1);
  Device<uint32_t> refused(1);
  // That of the first set: a captured decoder knows its packet's length.
  const size_t length = encode_here(set_of(random, kCount, kEach), how).size();
  const Source from{indices.at(), values.at(), kEach, 0, kCount, nullptr, out.at()};
  const kernels::DeviceKernels::CompactPacket one{out.at(), length, kEach, 0, kCount};
  Device<std::byte> writing(kernels().compact_encoding_bytes({&from, 1}, {how, 1, {}}));
  Device<std::byte> reading(kernels().compact_decoding_bytes({&one, 1}, 1));
  check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  kernels().encode_compact({&from, 1}, {how, 1, {}}, {bytes.at(), {writing.at(), writing.size()}},
                           queue());
  kernels().decode_compact(
      {&one, 1}, {1, found.at(), numbers_found.at(), refused.at(), {reading.at(), reading.size()}},
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
    const Bytes wanted = encode_here(set, how);
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
