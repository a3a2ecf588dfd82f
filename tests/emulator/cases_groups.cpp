// The update step on the device as on the CPU: the same packet and residual; the packet decoded;
// and the values written back.
#include <numeric>

#include "cases.hpp"
#include "codec/groups.h"
#include "kernels/groups.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

// One array of all tensors, with these counts.
struct Tensors {
  Tensors(std::mt19937& random, const std::vector<size_t>& of, size_t skew,
          Dtype dtype = Dtype::float32)
      : counts(of),
        all(std::accumulate(of.begin(), of.end(), size_t{0})),
        bytes(bytes_of(dtype)),
        theta(as_bytes(numbers(random, all), dtype), skew * bytes),
        param(as_bytes(numbers(random, all), dtype), skew * bytes),
        residual(numbers(random, all), skew) {}

  // Calls f(first element, elements) for each tensor.
  template <class F>
  void each(F f) const {
    size_t first = 0;
    for (const size_t count : counts) {
      f(first, count);
      first += count;
    }
  }
  std::vector<kernels::UpdatePiece> pieces(const Side& side) {
    std::vector<kernels::UpdatePiece> found;
    each([&](size_t first, size_t n) {
      found.push_back({theta.at(side) + first * bytes, param.at(side) + first * bytes,
                       residual.at(side) + first, n});
    });
    return found;
  }
  std::vector<kernels::Array> arrays(const Side& side) {
    std::vector<kernels::Array> found;
    each([&](size_t first, size_t n) { found.push_back({residual.at(side) + first, n}); });
    return found;
  }

  std::vector<size_t> counts;
  size_t all, bytes;
  Twin<std::byte> theta, param;
  Twin<float> residual;
};

// A packet of groups.
struct Packet {
  std::vector<std::byte> bytes;
  size_t k, values;
};

// Decodes a packet twice in one call, for tensors with these counts: refused if they do not have
// its values.
void try_decode(const Packet& packet, const std::vector<size_t>& counts, size_t group, bool fits,
                const std::string& what) {
  constexpr size_t kCopies = 2;
  Twin<std::byte> bytes(packet.bytes);
  Twin<int32_t> elements(kCopies * packet.values);
  Twin<float> values(kCopies * packet.values);
  Twin<uint32_t> refused(kCopies);
  const std::vector<uint64_t> tensors(counts.begin(), counts.end());
  const auto decode = [&](const Side& side) {
    const std::vector<kernels::GroupPacket> packets(
        kCopies, {bytes.at(side), packet.bytes.size(), packet.k, packet.values});
    kernels::GroupDecoding decoding{.counts = tensors,
                                    .group = group,
                                    .packets = packets,
                                    .elements = elements.at(side),
                                    .values = values.at(side),
                                    .refused = refused.at(side),
                                    .workspace = {}};
    Room room(side, side.kernels.group_decoding_bytes(decoding));
    decoding.workspace = room.space();
    side.kernels.decode_groups(decoding, side.queue);
  };
  if (fits) {
    on_both(decode);
  } else {  // for which the CPU throws
    std::fill_n(elements.at(here()), elements.size(), -1);
    std::fill_n(refused.at(here()), kCopies, 1U);
    decode(there());
  }
  refused.compare(what + ": refused");
  elements.compare(what + ": other elements are decoded");
  values.compare(what + ": other values are decoded");
}

void try_step(Tensors x, size_t group, size_t k, codec::ValueCode code, Dtype dtype) {
  const std::string what = std::to_string(k) + " groups of " + std::to_string(group);
  size_t groups = 0;
  for (const size_t count : x.counts) groups += kernels::groups_in(count, group);
  Twin<int32_t> indices(k);
  Twin<float> sizes(k), values(k * group);
  Twin<uint64_t> counts(2);
  Twin<std::byte> packet(codec::most_group_bytes(k, groups, k * group, code));
  on_both([&](const Side& side) {
    const auto arrays = x.arrays(side);
    Room room(side, side.kernels.group_workspace_bytes({arrays.size(), groups, k}));
    side.kernels.topk_groups({arrays, group, k, indices.at(side), sizes.at(side), room.space()},
                             side.queue);
  });
  indices.compare(what + ": other groups are the largest");
  sizes.compare(what + ": another size");
  on_both([&](const Side& side) {
    const auto pieces = x.pieces(side);
    Room room(side, side.kernels.group_workspace_bytes({pieces.size(), groups, k}));
    side.kernels.update_step({.pieces = pieces,
                              .dtype = dtype,
                              .group = group,
                              .k = k,
                              .value_code = code,
                              .indices = indices.at(side),
                              .values = values.at(side),
                              .packet = packet.at(side),
                              .sizes = counts.at(side),
                              .workspace = room.space()},
                             side.queue);
  });
  counts.compare(what + ": other sizes");
  indices.compare(what + ": other groups");
  const Packet coded{{packet.values().begin(),
                      packet.values().begin() + static_cast<ptrdiff_t>(counts.values()[1])},
                     k,
                     static_cast<size_t>(counts.values()[0])};
  packet.compare(what + ": other bytes", coded.bytes.size());
  values.compare(what + ": other values", coded.values);
  x.residual.compare(what + ": another residual");
  x.param.compare(what + ": other parameters");
  try_decode(coded, x.counts, group, true, what);
  std::vector<size_t> longer;  // as many groups, but no short ones
  for (const size_t count : x.counts) longer.push_back(kernels::groups_in(count, group) * group);
  if (coded.values != k * group)
    try_decode(coded, longer, group, false, what + " of longer tensors");
  on_both([&](const Side& side) {
    const auto arrays = x.arrays(side);
    Room room(side, side.kernels.group_workspace_bytes({arrays.size(), groups, k}));
    side.kernels.write_groups(
        {arrays, group, {indices.at(side), k}, {values.at(side), coded.values}, room.space()},
        side.queue);
  });
  x.residual.compare(what + ": values were not written back");
}

}  // namespace

void run_groups(std::mt19937& random) {
  const std::vector<size_t> counts{1500, 0, 17, 300};
  for (const auto code : {codec::ValueCode::one_bit, codec::ValueCode::three_bit})
    for (const size_t group : {1, 2, 16, 256, 1024})
      for (const size_t skew : {0, 1}) {
        size_t groups = 0;
        for (const size_t count : counts) groups += kernels::groups_in(count, group);
        for (const size_t k : {size_t{0}, (groups + 3) / 4, groups})
          try_step(Tensors(random, counts, skew), group, k, code, Dtype::float32);
      }
  for (const size_t count : sizes({}))
    try_step(Tensors(random, {count, 33}, 0), 16, count / 160 + 1, codec::ValueCode::two_bit,
             Dtype::float32);
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16})
    try_step(Tensors(random, counts, 1, dtype), 16, 20, codec::ValueCode::two_bit, dtype);
}

}  // namespace cases
