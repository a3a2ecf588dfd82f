// Quantized arrays compared with the CPU's codes: the same bytes, what is lost, and decoded values.
#include <limits>

#include "cases.hpp"
#include "codec/cpu/value_codes.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

struct Quantized {
  Bytes packet;
  Floats lost;
  Floats values;
  bool finite = true;
};

// By the CPU's codes, one block after the other.
Quantized quantize_here(const Floats& x, const Floats& residual, unsigned bits) {
  Quantized found{{}, residual, Floats(x.size())};
  for (size_t first = 0; first < x.size(); first += codec::kValueBlock) {
    const size_t n = std::min(codec::kValueBlock, x.size() - first), begin = found.packet.size();
    Floats t(n);
    for (size_t i = 0; i < n; ++i) t[i] = x[first + i] + residual[first + i];
    found.packet.resize(begin + codec::level_block_bytes(bits, n));
    codec::write_levels(bits, t, found.packet.data() + begin);
    codec::read_levels(bits, found.packet.data() + begin,
                       std::span(found.values).subspan(first, n));
    const bool finite = codec::has_finite_levels(bits, found.packet.data() + begin);
    found.finite &= finite;
    for (size_t i = 0; finite && i < n; ++i) found.lost[first + i] = t[i] - found.values[first + i];
  }
  return found;
}

std::vector<kernels::Block> blocks_of(size_t count) {
  std::vector<kernels::Block> blocks;
  for (size_t first = 0; first < count; first += codec::kValueBlock)
    blocks.push_back({first, std::min(codec::kValueBlock, count - first)});
  return blocks;
}

void try_array(const Floats& given, const Floats& residual, unsigned bits) {
  const size_t count = given.size();
  const std::string what = std::to_string(count) + " at " + std::to_string(bits) + " bits";
  const Quantized wanted = quantize_here(given, residual, bits);
  const std::vector<kernels::Block> table = blocks_of(count);
  const kernels::Blocks blocks{table, bits};
  Device<float> x(given, 1), rest(residual, 3), lost(count);
  Device<std::byte> packet(wanted.packet.size(), 1);
  kernels().quantize({x.at(), count, Dtype::float32}, blocks, {rest.at(), lost.at()}, packet.at(),
                     queue());
  check(packet.read() == wanted.packet, what + ": other bytes");
  check(same_bits(lost.read(), wanted.lost), what + ": something else is lost");
  check(same_bits(rest.read(), residual), what + ": the residual changed");
  kernels().quantize({x.at(), count, Dtype::float32}, blocks, {rest.at(), rest.at()}, packet.at(),
                     queue());
  check(same_bits(rest.read(), wanted.lost), what + ": another residual");

  Device<uint32_t> not_finite(1);
  not_finite.clear();
  Device<float> out(residual);
  kernels().dequantize(packet.at(), blocks, {0.25f, false, not_finite.at()},
                       {out.at(), count, Dtype::float32}, queue());
  check((not_finite.read()[0] == 0) == wanted.finite, what + ": another verdict");
  kernels().dequantize(packet.at(), blocks, {0.25f, true, nullptr},
                       {out.at(), count, Dtype::float32}, queue());
  const Floats sums = out.read();
  for (size_t i = 0; i < count; ++i) {
    const float half = wanted.values[i] * 0.25f + wanted.values[i] * 0.25f;
    check(half == sums[i] || (half != half && sums[i] != sums[i]), what + ": other values");
  }
}

}  // namespace

void run_quantize(std::mt19937& random) {
  for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
    for (const size_t count : {1, 9, 127, 300, 4097}) {
      Floats x = numbers(random, count);
      for (size_t i = 0; i < count; i += 5) x[i] *= 1e-7f;  // beyond the reach of the grids
      try_array(x, numbers(random, count, 1e-3f), bits);
    }
  for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
    for (const float odd : {std::numeric_limits<float>::infinity(), NAN, 0.0f, 1e-45f}) {
      Floats x(40, 0.0f);
      x[7] = odd;
      try_array(x, Floats(40, 0.0f), bits);
    }
}

}  // namespace cases
