// Decode, scatter, encode, rollback and masking against loops.
#include <algorithm>
#include <memory>
#include <numeric>

#include "cases.hpp"
#include "codec/packet.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

// `k` of the positions from `low` to `high`, ascending.
std::vector<int32_t> some(std::mt19937& random, size_t low, size_t high, size_t k) {
  std::vector<int32_t> all(high - low);
  std::iota(all.begin(), all.end(), static_cast<int32_t>(low));
  std::shuffle(all.begin(), all.end(), random);
  all.resize(k);
  std::sort(all.begin(), all.end());
  return all;
}

// The packet of one rank, on the device and in host memory.
struct Sent {
  Sent(std::mt19937& random, std::vector<int32_t> at)
      : values(numbers(random, at.size())),
        indices(std::move(at)),
        on_indices(indices),
        on_values(values) {}
  std::vector<float> values;
  std::vector<int32_t> indices;
  Device<int32_t> on_indices;
  Device<float> on_values;

  codec::Packet packet() { return {on_indices.at(), on_values.at(), values.size()}; }
};
using All = std::vector<std::unique_ptr<Sent>>;

// The sums in rank order, and which elements have one.
void sum(const All& all, std::vector<float>& sums, std::vector<bool>& there) {
  for (const auto& sent : all)
    for (size_t i = 0; i < sent->values.size(); ++i) {
      const auto at = static_cast<size_t>(sent->indices[i]);
      sums[at] = there[at] ? sums[at] + sent->values[i] : sent->values[i];
      there[at] = true;
    }
}

void try_decode(std::mt19937& random, const std::vector<size_t>& counts, const All& sent) {
  const size_t count = std::accumulate(counts.begin(), counts.end(), size_t{0});
  std::vector<codec::Packet> packets;
  for (const auto& one : sent) packets.push_back(one->packet());
  std::vector<float> sums(count), before = numbers(random, count);
  std::vector<bool> there(count);
  sum(sent, sums, there);
  std::vector<std::unique_ptr<Device<float>>> outs, params;
  std::vector<kernels::Array> out_arrays, param_arrays;
  size_t first = 0;
  for (const size_t n : counts) {
    outs.push_back(std::make_unique<Device<float>>(n, 1));
    params.push_back(std::make_unique<Device<float>>(
        std::vector<float>(before.begin() + static_cast<std::ptrdiff_t>(first),
                           before.begin() + static_cast<std::ptrdiff_t>(first + n))));
    out_arrays.push_back({outs.back()->at(), n});
    param_arrays.push_back({params.back()->at(), n});
    first += n;
  }
  kernels().decode_sum({out_arrays, Dtype::float32}, packets, Dtype::float32, 0.25, queue());
  kernels().decode_update({param_arrays, Dtype::float32}, packets, Dtype::float32,
                          {.lr = 0.1, .scale = 0.25}, queue());
  size_t at = 0;
  for (size_t a = 0; a < counts.size(); ++a) {
    const auto out = outs[a]->read(), param = params[a]->read();
    for (size_t i = 0; i < counts[a]; ++i, ++at) {
      const float mean = 0.25f * sums[at];
      check(out[i] == (there[at] ? mean : 0), "decode_sum at " + std::to_string(at));
      const float updated = std::fma(-0.1f, mean, before[at]);
      check(param[i] == (there[at] ? updated : before[at]),
            "decode_update at " + std::to_string(at));
    }
  }
}

void try_decodes(std::mt19937& random) {
  All all;
  const auto send = [&](size_t low, size_t high, size_t k) {
    all.push_back(std::make_unique<Sent>(random, some(random, low, high, k)));
  };
  for (const size_t k : {250, 0, 1666, 5000, 714}) send(0, 5000, k);
  try_decode(random, {5000}, all);
  all.clear();
  for (const size_t k : {150, 0, 1300, 3724, 500}) send(0, 3724, k);
  try_decode(random, {700, 0, 1, 1999, 1024}, all);
  all.clear();
  for (size_t rank = 0; rank < 70; ++rank) send(0, 1500, 20);  // several groups of 32
  try_decode(random, {4000}, all);
  all.clear();
  for (size_t rank = 0; rank < 4; ++rank) send(3000, 4300, 1200);  // too many for a block
  send(6000, 12'000, 5000);
  try_decode(random, {40'000}, all);
  all.clear();
  for (size_t rank = 0; rank < 3; ++rank) send(0, 170'000, 2000);  // several chunks of zeros
  try_decode(random, {170'000}, all);
}

// Indices that neither ascend nor are in range: what is written is unspecified, and is not outside.
void try_invalid(std::mt19937& random) {
  constexpr size_t kCount = 40'000;
  All all;
  std::vector<codec::Packet> packets;
  for (size_t rank = 0; rank < 5; ++rank) {
    auto indices = some(random, 3000, 4100, 1000);
    for (size_t i = rank; i < indices.size(); i += 5)
      indices[i] = random() % 2 == 0 ? -1 - static_cast<int32_t>(random() % 1000)
                                     : static_cast<int32_t>(kCount + random() % 1'000'000'000);
    all.push_back(std::make_unique<Sent>(random, indices));
    packets.push_back(all.back()->packet());
  }
  Device<float> out(kCount), param(std::vector<float>(kCount, 1.F));
  const std::vector<kernels::Array> outs{{out.at(), kCount}}, params{{param.at(), kCount}};
  kernels().decode_sum({outs, Dtype::float32}, packets, Dtype::float32, 1, queue());
  kernels().decode_update({params, Dtype::float32}, packets, Dtype::float32, {.lr = 1, .scale = 1},
                          queue());
  const auto sums = out.read(), updated = param.read();
  for (size_t i = 0; i < kCount; ++i)
    if (i < 3000 || i >= 4100) check(sums[i] == 0 && updated[i] == 1, "an element without entry");
}

void try_single(std::mt19937& random) {
  constexpr size_t kCount = 3000, kEach = 301;
  Sent sent(random, some(random, 0, kCount, kEach));
  auto values = numbers(random, kCount);
  Device<float> out(values, 1), u(values), v(values);
  kernels().scatter_add({out.at(), kCount, Dtype::float32}, sent.packet(), Dtype::float32, 3,
                        queue());
  kernels().momentum_mask(u.at(), v.at(), {{sent.on_indices.at(), kEach}, kCount, Dtype::float32},
                          queue());
  auto masked = values;
  for (size_t i = 0; i < kEach; ++i) {
    const auto at = static_cast<size_t>(sent.indices[i]);
    values[at] += 3 * sent.values[i];
    masked[at] = 0;
  }
  check(same_bits(out.read(), values), "scatter_add");
  check(same_bits(u.read(), masked) && same_bits(v.read(), masked), "momentum_mask");

  Device<float> residual(masked);
  Device<std::byte> bytes(codec::raw_packet_bytes(kEach, Dtype::bfloat16));
  kernels().encode(sent.packet(),
                   {.count = kCount,
                    .dtype = Dtype::float32,
                    .value_dtype = Dtype::bfloat16,
                    .residual = residual.at(),
                    .out = bytes.at()},
                   queue());
  const auto written = bytes.read();
  const codec::PacketHeader header = codec::read_packet_header(written);
  check(header.k == kEach && header.count == kCount, "encode: header");
  check(std::memcmp(written.data() + codec::raw_indices_offset(kEach, Dtype::bfloat16),
                    sent.indices.data(), kEach * 4) == 0,
        "encode: indices");
  const auto rest = residual.read();
  for (size_t i = 0; i < kEach; ++i) {
    uint16_t half = 0;
    std::memcpy(&half, written.data() + codec::kPacketHeaderBytes + 2 * i, 2);
    const uint32_t wide = uint32_t{half} << 16;
    float value = 0;
    std::memcpy(&value, &wide, 4);
    check(std::abs(value - sent.values[i]) <= std::abs(sent.values[i]) / 256, "encode: values");
    check(rest[static_cast<size_t>(sent.indices[i])] == sent.values[i] - value, "encode: residual");
  }
}

void try_rollback(std::mt19937& random) {
  constexpr size_t kEach = 700;
  Device<float> u(numbers(random, 2000)), v(numbers(random, 2000)), u2(numbers(random, 1000)),
      v2(numbers(random, 1000));
  Sent sent(random, some(random, 0, 3000, kEach)), old(random, some(random, 0, 3000, kEach));
  const std::vector<kernels::DgcPiece> pieces{{nullptr, nullptr, u.at(), v.at(), 2000},
                                              {nullptr, nullptr, u2.at(), v2.at(), 1000}};
  const std::vector<kernels::DgcSelection> selections{
      {2, kEach, 0, sent.on_indices.at(), sent.on_values.at(), old.on_values.at()}};
  kernels().dgc_rollback({pieces, selections, Dtype::float32}, nullptr, queue());
  const auto a = v.read(), b = v2.read(), c = u.read(), d = u2.read();
  for (size_t i = 0; i < kEach; ++i) {
    const auto at = static_cast<size_t>(sent.indices[i]);
    check((at < 2000 ? a[at] : b[at - 2000]) == sent.values[i], "rollback: v");
    check((at < 2000 ? c[at] : d[at - 2000]) == old.values[i], "rollback: u");
  }
}

}  // namespace

void run_packets(std::mt19937& random) {
  try_decodes(random);
  try_invalid(random);
  try_single(random);
  try_rollback(random);
}

}  // namespace cases
