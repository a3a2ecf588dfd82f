// Decode, scatter, encode, rollback and masking, on the device as on the CPU.
#include <numeric>

#include "cases.hpp"
#include "codec/packet.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

// Of the arrays and of a packet's values.
struct Dtypes {
  Dtype array = Dtype::float32;
  Dtype value = Dtype::float32;
};

// The packet of one rank.
struct Sent {
  Sent(std::mt19937& random, const std::vector<int32_t>& at, Dtype dtype)
      : values(as_bytes(numbers(random, at.size()), dtype)), indices(at) {}
  Twin<std::byte> values;
  Twin<int32_t> indices;

  codec::Packet packet(const Side& side) {
    return {indices.at(side), values.at(side), indices.size()};
  }
};
using All = std::vector<std::unique_ptr<Sent>>;

std::vector<codec::Packet> packets_of(const All& all, const Side& side) {
  std::vector<codec::Packet> packets;
  for (const auto& one : all) packets.push_back(one->packet(side));
  return packets;
}

// Arrays of these counts.
struct Chain {
  Chain(std::mt19937& random, const std::vector<size_t>& counts, Dtype of, size_t skew)
      : dtype(of) {
    for (const size_t count : counts)
      all.push_back(std::make_unique<Twin<std::byte>>(as_bytes(numbers(random, count), of),
                                                      skew * bytes_of(of)));
  }
  std::vector<kernels::Array> arrays(const Side& side) const {
    std::vector<kernels::Array> found;
    for (const auto& one : all) found.push_back({one->at(side), one->size() / bytes_of(dtype)});
    return found;
  }
  void compare(const std::string& what) const {
    for (const auto& one : all) one->compare(what);
  }
  Dtype dtype;
  std::vector<std::unique_ptr<Twin<std::byte>>> all;
};

void try_decode(std::mt19937& random, const std::vector<size_t>& counts, const All& sent,
                Dtypes dtypes = {}) {
  const Chain out(random, counts, dtypes.array, 1), param(random, counts, dtypes.array, 0);
  on_both([&](const Side& side) {
    const auto outs = out.arrays(side), params = param.arrays(side);
    const auto packets = packets_of(sent, side);
    side.kernels.decode_sum({outs, dtypes.array}, packets, dtypes.value, 0.25, side.queue);
    side.kernels.decode_update({params, dtypes.array}, packets, dtypes.value,
                               {.lr = 0.1, .scale = 0.25}, side.queue);
  });
  const std::string what =
      " of " + std::to_string(std::accumulate(counts.begin(), counts.end(), size_t{0}));
  out.compare("decode_sum" + what);
  param.compare("decode_update" + what);
}

void try_decodes(std::mt19937& random, Dtypes dtypes) {
  All all;
  const auto send = [&](size_t low, size_t high, size_t k) {
    all.push_back(
        std::make_unique<Sent>(random, positions(random, high - low, k, low), dtypes.value));
  };
  const auto decode = [&](const std::vector<size_t>& counts) {
    try_decode(random, counts, all, dtypes);
    all.clear();
  };
  for (const size_t k : {250, 0, 1666, 5000, 714}) send(0, 5000, k);
  decode({5000});
  for (const size_t k : {150, 0, 1300, 3724, 500}) send(0, 3724, k);
  decode({700, 0, 1, 1999, 1024});
  for (size_t rank = 0; rank < 70; ++rank) send(0, 1500, 20);  // several groups of 32
  decode({4000});
  for (size_t rank = 0; rank < 4; ++rank) send(3000, 4300, 1200);  // too many for a block
  send(6000, 12'000, 5000);
  decode({40'000});
  for (size_t rank = 0; rank < 3; ++rank) send(0, 170'000, 2000);  // several chunks of zeros
  decode({170'000});
  for (const size_t count : sizes({}))
    for (const size_t share : {1000, 100, 3}) {
      for (size_t rank = 0; rank < 8; ++rank) send(0, count, count / share + 1);
      decode({count});
    }
}

// Indices that neither ascend nor are in range: what is written is unspecified, and is not outside.
void try_invalid(std::mt19937& random) {
  constexpr size_t kCount = 40'000;
  All all;
  for (size_t rank = 0; rank < 5; ++rank) {
    auto indices = positions(random, 1100, 1000, 3000);
    for (size_t i = rank; i < indices.size(); i += 5)
      indices[i] = random() % 2 == 0 ? -1 - static_cast<int32_t>(random() % 1000)
                                     : static_cast<int32_t>(kCount + random() % 1'000'000'000);
    all.push_back(std::make_unique<Sent>(random, indices, Dtype::float32));
  }
  const auto packets = packets_of(all, there());
  Device<float> out(kCount), param(std::vector<float>(kCount, 1.F));
  const std::vector<kernels::Array> outs{{out.at(), kCount}}, params{{param.at(), kCount}};
  kernels().decode_sum({outs, Dtype::float32}, packets, Dtype::float32, 1, queue());
  kernels().decode_update({params, Dtype::float32}, packets, Dtype::float32, {.lr = 1, .scale = 1},
                          queue());
  const auto sums = out.read(), updated = param.read();
  for (size_t i = 0; i < kCount; ++i)
    if (i < 3000 || i >= 4100) check(sums[i] == 0 && updated[i] == 1, "an element without entry");
}

void try_single(std::mt19937& random, size_t count, Dtypes dtypes) {
  const size_t each = count / 10 + 1;
  Sent sent(random, positions(random, count, each), dtypes.array);
  const auto values = as_bytes(numbers(random, count), dtypes.array);
  Twin<std::byte> out(values, bytes_of(dtypes.array)), residual(values);
  Twin<std::byte> bytes(codec::raw_packet_bytes(each, dtypes.value));
  on_both([&](const Side& side) {
    side.kernels.scatter_add({out.at(side), count, dtypes.array}, sent.packet(side), dtypes.array,
                             3, side.queue);
    if (is_half(dtypes.array)) return;
    side.kernels.encode(sent.packet(side),
                        {.count = count,
                         .dtype = dtypes.array,
                         .value_dtype = dtypes.value,
                         .residual = residual.at(side),
                         .out = bytes.at(side)},
                        side.queue);
  });
  out.compare("scatter_add");
  bytes.compare("encode: bytes");
  residual.compare("encode: residual");
}

void try_masks(std::mt19937& random, size_t count) {
  const size_t first = count / 3 * 2, each = count / 10 + 1;
  Twin<float> u(numbers(random, first)), v(numbers(random, first)),
      u2(numbers(random, count - first)), v2(numbers(random, count - first));
  Sent sent(random, positions(random, count, each), Dtype::float32);
  Sent masked(random, positions(random, first, each / 2), Dtype::float32);
  Twin<float> old(numbers(random, each));
  const auto compare = [&](const std::string& what) {
    for (Twin<float>* one : {&u, &v, &u2, &v2}) one->compare(what);
  };
  on_both([&](const Side& side) {
    const std::vector<kernels::DgcPiece> pieces{
        {nullptr, nullptr, u.at(side), v.at(side), first},
        {nullptr, nullptr, u2.at(side), v2.at(side), count - first}};
    const std::vector<kernels::DgcSelection> selections{
        {2, each, 0, sent.indices.at(side), sent.values.at(side), old.at(side)}};
    side.kernels.dgc_rollback({pieces, selections, Dtype::float32}, nullptr, side.queue);
  });
  compare("rollback");
  on_both([&](const Side& side) {
    side.kernels.momentum_mask(
        u.at(side), v.at(side),
        {{masked.indices.at(side), masked.indices.size()}, first, Dtype::float32}, side.queue);
  });
  compare("momentum_mask");
}

}  // namespace

void run_packets(std::mt19937& random) {
  try_decodes(random, {});
  try_invalid(random);
  for (const size_t count : sizes({3000})) {
    try_single(random, count, {Dtype::float32, Dtype::bfloat16});
    try_masks(random, count);
  }
}

void run_packet_dtypes(std::mt19937& random) {
  for (const Dtype array : kFloats)
    for (const Dtype value : kFloats) {
      All all;
      for (const size_t k : {250, 0, 1666})
        all.push_back(std::make_unique<Sent>(random, positions(random, 5000, k), value));
      try_decode(random, {5000}, all, {array, value});
      try_single(random, 3000, {array, value});
    }
}

}  // namespace cases
