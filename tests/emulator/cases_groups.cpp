// The update step compared with sums in the same order, a selection by sorting, and the codec of
// the CPU: the same packet and residual; the packet decoded; and the values written back.
#include <algorithm>

#include "cases.hpp"
#include "codec/groups.h"
#include "kernels/groups.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Floats = std::vector<float>;

// One array of all tensors, and what is expected of it.
struct Tensors {
  std::vector<size_t> counts;
  Floats theta, param, residual;

  size_t size() const { return theta.size(); }
};

Tensors tensors_of(std::mt19937& random, const std::vector<size_t>& counts) {
  size_t all = 0;
  for (const size_t count : counts) all += count;
  return {counts, numbers(random, all), numbers(random, all), numbers(random, all)};
}

// Calls f(first element, elements) for each group.
template <class F>
void each_group(const std::vector<size_t>& counts, size_t group, F&& f) {
  size_t first = 0;
  for (const size_t count : counts) {
    for (size_t begin = 0; begin < count; begin += group)
      f(first + begin, std::min(group, count - begin));
    first += count;
  }
}

Floats sizes_of(const Tensors& x, size_t group) {
  Floats sizes;
  each_group(x.counts, group, [&](size_t first, size_t n) {
    Floats sums(group, 0.0f);
    for (size_t i = 0; i < n; ++i) sums[i] = x.residual[first + i] * x.residual[first + i];
    for (size_t left = group / 2; left > 0; left /= 2)
      for (size_t i = 0; i < left; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    sizes.push_back(sums[0]);
  });
  return sizes;
}

// The elements of the selected groups, by the place of each.
class Selected final : public codec::GroupValues {
 public:
  Selected(Tensors& x, size_t group, const std::vector<int32_t>& indices) : x_(x) {
    int32_t number = 0;
    each_group(x.counts, group, [&](size_t first, size_t n) {
      if (std::binary_search(indices.begin(), indices.end(), number++))
        for (size_t i = 0; i < n; ++i) places_.push_back(first + i);
    });
    for (const size_t place : places_) before_.push_back(x.residual[place]);
  }
  size_t count() const { return places_.size(); }
  const Floats& before() const { return before_; }
  void read(size_t first, std::span<float> values) const override {
    for (size_t i = 0; i < values.size(); ++i) values[i] = x_.residual[places_[first + i]];
  }
  void write_errors(size_t first, std::span<const float> errors) const override {
    for (size_t i = 0; i < errors.size(); ++i) x_.residual[places_[first + i]] = errors[i];
  }

 private:
  Tensors& x_;
  std::vector<size_t> places_;
  Floats before_;
};

void in_order(size_t tasks, const std::function<void(size_t)>& task) {
  for (size_t i = 0; i < tasks; ++i) task(i);
}

// Decodes a packet of these groups twice in one call, for tensors with these counts: refused if
// they do not have its values.
void try_decode(const std::vector<std::byte>& packet, const std::vector<size_t>& counts,
                size_t group, const std::vector<int32_t>& indices, size_t value_count,
                const std::string& what) {
  std::vector<int32_t> groups(indices.size()), elements;
  Floats values(value_count);
  codec::decode_groups(codec::GroupReader(packet), groups.data(), values.data(), in_order);
  int32_t number = 0;
  each_group(counts, group, [&](size_t first, size_t n) {
    if (std::binary_search(indices.begin(), indices.end(), number++))
      for (size_t i = 0; i < n; ++i) elements.push_back(static_cast<int32_t>(first + i));
  });
  const bool fits = elements.size() == value_count;
  if (!fits) {
    elements.assign(value_count, -1);
    values.assign(value_count, 0);
  }
  constexpr size_t kCopies = 2;
  Device<std::byte> bytes(packet);
  Device<int32_t> found(kCopies * value_count);
  Device<float> read(kCopies * value_count);
  Device<uint32_t> refused(kCopies);
  const std::vector<uint64_t> tensors(counts.begin(), counts.end());
  const std::vector<kernels::GroupPacket> packets(
      kCopies, {bytes.at(), packet.size(), indices.size(), value_count});
  kernels::GroupDecoding decoding{.counts = tensors,
                                  .group = group,
                                  .packets = packets,
                                  .elements = found.at(),
                                  .values = read.at(),
                                  .refused = refused.at(),
                                  .workspace = {}};
  const size_t needed = kernels().group_decoding_bytes(decoding);
  Device<std::byte> workspace(needed);
  decoding.workspace = {workspace.at(), needed};
  kernels().decode_groups(decoding, queue());
  check(refused.read() == std::vector<uint32_t>(kCopies, fits ? 0 : 1), what + ": refused");
  const auto repeat = [](auto& list) { list.insert(list.end(), list.begin(), list.end()); };
  elements.reserve(kCopies * value_count);
  values.reserve(kCopies * value_count);
  repeat(elements);
  repeat(values);
  check(found.read() == elements, what + ": other elements are decoded");
  check(same_bits(read.read(), values), what + ": other values are decoded");
}

// `skew` makes the arrays unaligned.
void try_step(Tensors x, size_t group, size_t k, codec::ValueCode code, size_t skew) {
  const std::string what = std::to_string(k) + " groups of " + std::to_string(group);
  Device<float> theta(x.theta, skew), param(x.param, skew), residual(x.residual, skew);
  std::vector<kernels::UpdatePiece> pieces;
  std::vector<kernels::Array> arrays;
  size_t first = 0;
  for (const size_t count : x.counts) {
    pieces.push_back({theta.at() + first, param.at() + first, residual.at() + first, count});
    arrays.push_back({residual.at() + first, count});
    first += count;
  }
  const Floats sizes_before = sizes_of(x, group);
  const std::vector<int32_t> largest_before = largest(sizes_before, k);
  for (size_t i = 0; i < x.size(); ++i) x.residual[i] += x.theta[i] - x.param[i];
  const Floats sizes = sizes_of(x, group), whole = x.residual;
  const std::vector<int32_t> indices = largest(sizes, k);
  const Selected values(x, group, indices);
  std::vector<std::byte> packet(codec::most_group_bytes(k, sizes.size(), k * group, code));
  packet.resize(codec::encode_groups({indices, sizes.size(), values.count(), code}, values,
                                     packet.data(), in_order));

  const size_t bytes = kernels().group_workspace_bytes({pieces.size(), sizes.size(), k});
  Device<std::byte> workspace(bytes),
      out(codec::most_group_bytes(k, sizes.size(), k * group, code));
  Device<int32_t> chosen(k);
  Device<float> sent(k * group), chosen_sizes(k);
  Device<uint64_t> counts(2);
  kernels().topk_groups({arrays, group, k, chosen.at(), chosen_sizes.at(), {workspace.at(), bytes}},
                        queue());
  check(chosen.read() == largest_before, what + ": other groups are the largest");
  const Floats found_sizes = chosen_sizes.read();
  for (size_t i = 0; i < k; ++i)
    check(found_sizes[i] == sizes_before[static_cast<size_t>(largest_before[i])],
          what + ": another size");
  kernels().update_step({.pieces = pieces,
                         .dtype = Dtype::float32,
                         .group = group,
                         .k = k,
                         .value_code = code,
                         .indices = chosen.at(),
                         .values = sent.at(),
                         .packet = out.at(),
                         .sizes = counts.at(),
                         .workspace = {workspace.at(), bytes}},
                        queue());
  const auto found = counts.read();
  check(found == std::vector<uint64_t>{values.count(), packet.size()}, what + ": other sizes");
  check(chosen.read() == indices, what + ": other groups");
  auto coded = out.read();
  coded.resize(packet.size());
  check(coded == packet, what + ": other bytes");
  check(same_bits(residual.read(), x.residual), what + ": another residual");
  check(same_bits(param.read(), x.theta), what + ": other parameters");
  if (skew == 0) {
    try_decode(packet, x.counts, group, indices, values.count(), what);
    std::vector<size_t> longer;  // as many groups, but no short ones
    for (const size_t count : x.counts) longer.push_back(kernels::groups_in(count, group) * group);
    try_decode(packet, longer, group, indices, values.count(), what + " of longer tensors");
  }
  kernels().write_groups(
      {arrays, group, {chosen.at(), k}, {sent.at(), values.count()}, {workspace.at(), bytes}},
      queue());
  check(same_bits(residual.read(), whole), what + ": values were not written back");
}

}  // namespace

void run_groups(std::mt19937& random) {
  for (const auto code : {codec::ValueCode::one_bit, codec::ValueCode::three_bit})
    for (const size_t group : {1, 2, 16, 256, 1024})
      for (const size_t skew : {0, 1}) {
        const Tensors x = tensors_of(random, {1500, 0, 17, 300});
        const size_t groups = sizes_of(x, group).size();
        for (const size_t k : {size_t{0}, (groups + 3) / 4, groups})
          try_step(x, group, k, code, skew);
      }
}

}  // namespace cases
