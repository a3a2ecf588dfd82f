// Quantized arrays, on the device as on the CPU: the same bytes, what is lost, and decoded values.
#include "cases.hpp"
#include "codec/format.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Floats = std::vector<float>;

std::vector<kernels::Block> blocks_of(size_t count) {
  std::vector<kernels::Block> blocks;
  for (size_t first = 0; first < count; first += codec::kValueBlock)
    blocks.push_back({first, std::min(codec::kValueBlock, count - first)});
  return blocks;
}

void try_array(const Floats& given, const Floats& residual, Dtype dtype, unsigned bits) {
  const size_t count = given.size();
  const std::string what = std::to_string(count) + " " + std::string(name_of(dtype)) + " at " +
                           std::to_string(bits) + " bits";
  const std::vector<kernels::Block> table = blocks_of(count);
  const kernels::Blocks blocks{table, bits};
  Twin<std::byte> x(as_bytes(given, dtype), bytes_of(dtype)), packet(quantized_bytes(blocks), 1);
  Twin<float> rest(residual, 3), lost(count), out(residual);
  Twin<std::byte> narrow(as_bytes(residual, dtype), bytes_of(dtype));
  Twin<uint32_t> not_finite(1);
  const auto quantize = [&](Twin<float>& to) {
    on_both([&](const Side& side) {
      side.kernels.quantize({x.at(side), count, dtype}, blocks, {rest.at(side), to.at(side)},
                            packet.at(side), side.queue);
    });
    packet.compare(what + ": other bytes");
  };
  quantize(lost);
  lost.compare(what + ": something else is lost");
  rest.compare(what + ": the residual changed");
  on_both([&](const Side& side) {
    const auto decode = [&](kernels::Decoding how, void* to, Dtype as) {
      side.kernels.dequantize(packet.at(side), blocks, how, {to, count, as}, side.queue);
    };
    decode({0.25f, false, not_finite.at(side)}, out.at(side), Dtype::float32);
    decode({0.25f, true, nullptr}, out.at(side), Dtype::float32);
    decode({1.0f, true, nullptr}, narrow.at(side), dtype);
  });
  not_finite.compare(what + ": another verdict");
  out.compare(what + ": other values");
  narrow.compare(what + ": other values of x's dtype");
  quantize(rest);
  rest.compare(what + ": another residual");
}

}  // namespace

void run_quantize(std::mt19937& random) {
  for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
    for (const size_t count : sizes({1, 9, 127, 300, 4097})) {
      Floats x = numbers(random, count);
      for (size_t i = 0; i < count; i += 5) x[i] *= 1e-7f;  // beyond the reach of the grids
      const Dtype dtype = kFloats[(count + bits) % 3];
      try_array(x, numbers(random, count, 1e-3f), dtype, bits);
      if (dtype != Dtype::float32) try_array(x, Floats(count, 0.0f), Dtype::float32, bits);
    }
  for (const unsigned bits : {1u, 2u, 3u, 4u, 8u})
    for (const float odd : {INFINITY, NAN, 0.0f, 1e-45f, 3.4028235e38f}) {
      Floats x(40, 0.0f);
      x[7] = odd;
      try_array(x, Floats(40, 0.0f), Dtype::float32, bits);
    }
}

}  // namespace cases
