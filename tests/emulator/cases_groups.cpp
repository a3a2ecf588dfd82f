// The update step on the device as on the CPU: the same groups, packets and residual; the packets
// decoded; and the values written back.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "cases.hpp"
#include "codec/compact.h"
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

// Groups that follow each other in two packets, of the groups before `split` and of the others.
struct Split {
  size_t k, groups, group;
  size_t first_k, split;
};

// The rows of both packets: row(packet, its first place in the selection, k, first group, groups).
template <class Row>
auto rows_of(const Split& s, Row row) {
  return std::vector{row(size_t{0}, size_t{0}, s.first_k, size_t{0}, s.split),
                     row(size_t{1}, s.first_k, s.k - s.first_k, s.split, s.groups - s.split)};
}

// Decodes both packets to elements, and adds them to tensors.
void try_decode(const std::vector<Twin<std::byte>*>& packets, const std::vector<uint64_t>& sizes,
                const Split& s, const Tensors& x, const std::string& what) {
  const size_t count = s.k * s.group;
  Twin<int32_t> elements(count);
  Twin<float> values(count), sums(x.all, 1);
  Twin<uint32_t> refused(2);
  on_both([&](const Side& side) {
    const auto rows = rows_of(s, [&](size_t p, size_t, size_t k, size_t first, size_t groups) {
      return kernels::DeviceKernels::CompactPacket{packets[p]->at(side), sizes[p], k, first,
                                                   groups};
    });
    Room room(side, side.kernels.compact_decoding_bytes(rows, s.group));
    side.kernels.decode_compact(
        rows, {s.group, elements.at(side), values.at(side), refused.at(side), room.space()},
        side.queue);
    std::vector<kernels::Array> arrays;
    x.each([&](size_t first, size_t n) { arrays.push_back({sums.at(side) + first, n}); });
    const codec::Packet all{elements.at(side), values.at(side), count};
    side.kernels.decode_sum({arrays, Dtype::float32, s.group}, {&all, 1}, Dtype::float32, 0.5,
                            side.queue);
    side.kernels.decode_update({arrays, Dtype::float32, s.group}, {&all, 1}, Dtype::float32,
                               {.lr = 0.1, .scale = 2}, side.queue);
  });
  refused.compare(what + ": refused");
  elements.compare(what + ": other elements are decoded");
  values.compare(what + ": other values are decoded");
  sums.compare(what + ": other sums");
}

void try_step(Tensors&& x, size_t group, size_t k, codec::ValueCode code, Dtype dtype) {
  const std::string what = std::to_string(k) + " groups of " + std::to_string(group);
  size_t groups = 0;
  for (const size_t count : x.counts) groups += kernels::groups_in(count, group);
  Twin<int32_t> indices(k);
  Twin<float> sizes(k), values(k * group);
  const auto largest = [&](const Side& side, Room& room) {
    return kernels::LargestGroups{group, k, indices.at(side), sizes.at(side), room.space()};
  };
  const size_t tensors = x.counts.size();
  on_both([&](const Side& side) {
    Room room(side, side.kernels.group_workspace_bytes({tensors, groups, k}));
    side.kernels.topk_groups(x.arrays(side), largest(side, room), side.queue);
  });
  indices.compare(what + ": other groups are the largest");
  sizes.compare(what + ": another size");
  on_both([&](const Side& side) {
    Room room(side, side.kernels.group_workspace_bytes({tensors, groups, k}));
    side.kernels.update_step(x.pieces(side), dtype, largest(side, room), side.queue);
  });
  indices.compare(what + ": other groups");
  x.residual.compare(what + ": another residual");
  x.param.compare(what + ": other parameters");

  const size_t split = groups / 3;
  const auto chosen = indices.values();
  const Split parts{
      k, groups, group,
      static_cast<size_t>(std::ranges::lower_bound(chosen, int32_t(split)) - chosen.begin()),
      split};
  const codec::CompactCodes codes{Dtype::float32, true, codec::IndexCode::list, code};
  Twin<std::byte> one(codec::most_compact_bytes(parts.first_k, split, group, codes));
  Twin<std::byte> other(codec::most_compact_bytes(k - parts.first_k, groups - split, group, codes));
  const std::vector<Twin<std::byte>*> packets{&one, &other};
  Twin<uint64_t> bytes(2);
  on_both([&](const Side& side) {
    const auto rows =
        rows_of(parts, [&](size_t p, size_t begin, size_t own, size_t first, size_t of) {
          return kernels::DeviceKernels::CompactSource{
              indices.at(side) + begin, values.at(side) + begin * group, own, first, of, nullptr,
              packets[p]->at(side)};
        });
    const auto arrays = x.arrays(side);
    const kernels::DeviceKernels::CompactInput input{codes, group, arrays};
    Room room(side, side.kernels.compact_encoding_bytes(rows, input));
    side.kernels.encode_compact(rows, input, {bytes.at(side), room.space()}, side.queue);
  });
  bytes.compare(what + ": other sizes");
  for (size_t p = 0; p < 2; ++p)
    packets[p]->compare(what + ": other bytes", static_cast<size_t>(bytes.values()[p]));
  values.compare(what + ": other values");
  x.residual.compare(what + ": other errors in the residual");
  try_decode(packets, bytes.values(), parts, x, what);
  on_both([&](const Side& side) {
    const auto arrays = x.arrays(side);
    Room room(side, side.kernels.group_workspace_bytes({arrays.size(), groups, k}));
    side.kernels.write_groups({arrays, group, {indices.at(side), k}, values.at(side), room.space()},
                              side.queue);
  });
  x.residual.compare(what + ": values were not written back");
}

// Indices that do not ascend: no packet, and the tensors as they were.
void try_wrong(std::mt19937& random) {
  const std::vector<float> before = numbers(random, 100);
  Device<float> tensor(before), values(32);
  Device<int32_t> indices(std::vector<int32_t>{3, 3});
  Device<std::byte> out(200);
  Device<uint64_t> bytes(1);
  const std::vector<kernels::Array> arrays{{tensor.at(), before.size()}};
  const kernels::DeviceKernels::CompactInput input{
      {Dtype::float32, true, codec::IndexCode::list, codec::ValueCode::one_bit}, 16, arrays};
  const kernels::DeviceKernels::CompactSource from{indices.at(), values.at(), 2, 0, 7,
                                                   nullptr,      out.at()};
  Room room(there(), there().kernels.compact_encoding_bytes({&from, 1}, input));
  there().kernels.encode_compact({&from, 1}, input, {bytes.at(), room.space()}, queue());
  check(bytes.read()[0] == 0, "wrong indices made a packet");
  check(same_bits(tensor.read(), before), "wrong indices changed a tensor");
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
  try_wrong(random);
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
    Tensors x(random, counts, 1, dtype);
    std::vector<float> rest = x.residual.values();
    rest[40] = std::numeric_limits<float>::infinity();
    rest[1510] = std::numeric_limits<float>::quiet_NaN();
    x.residual.write(rest);
    try_step(std::move(x), 16, 20, codec::ValueCode::two_bit, dtype);
  }
}

}  // namespace cases
