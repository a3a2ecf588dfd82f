// Host code of quantized arrays: a launch for each 2,600 blocks.
#include "codec/format.h"
#include "cuda/cuda_kernels.h"
#include "cuda/host.hpp"
#include "cuda/quantize.cuh"

namespace pycomm::cuda {
namespace {

static_assert(kLevelled == codec::kValueBlock);

unsigned code_of(unsigned bits) {
  switch (bits) {
    case 1:
      return kOneBit;
    case 2:
      return kTwoBit;
    case 3:
      return kThreeBit;
    case 4:
      return kFourBit;
    default:
      return kEightBit;
  }
}

// Calls f(rows of a launch, their number, the packet's bytes before them).
template <class F>
void each_page(const kernels::Blocks& blocks, F&& f) {
  size_t before = 0;
  QuantizedBlocks page;
  for (auto left = blocks.blocks; !left.empty();) {
    const auto now = left.first(std::min<size_t>(left.size(), kMostQuantized));
    size_t bytes = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      page.of[i] = {static_cast<unsigned>(now[i].offset), static_cast<unsigned>(now[i].count),
                    static_cast<unsigned>(bytes)};
      bytes += codec::level_block_bytes(blocks.bits, now[i].count);
    }
    f(page, static_cast<unsigned>(now.size()), before);
    before += bytes;
    left = left.subspan(now.size());
  }
}

// As with_float, without float64.
template <class F>
void with_narrow(Dtype dtype, F f) {
  with_float(dtype, [&](auto type) {
    if constexpr (!std::is_same_v<typename decltype(type)::type, double>) f(type);
  });
}

}  // namespace

void CudaKernels::quantize(kernels::TypedArray x, const kernels::Blocks& blocks,
                           kernels::Feedback feedback, std::byte* out, kernels::Queue queue) {
  const OnDevice on(queue);
  with_narrow(x.dtype, [&](auto type) {
    each_page(blocks, [&](const QuantizedBlocks& page, unsigned rows, size_t before) {
      const Quantizing q{x.data, feedback.residual, feedback.lost,
                         reinterpret_cast<uint8_t*>(out) + before, code_of(blocks.bits)};
      launch<quantize_blocks<typename decltype(type)::type>>(
          "quantize", {rows, kValueThreads, stream_of(queue)}, q, page);
    });
  });
}

void CudaKernels::dequantize(const std::byte* packet, const kernels::Blocks& blocks,
                             const kernels::Decoding& decoding, kernels::TypedArray out,
                             kernels::Queue queue) {
  const OnDevice on(queue);
  with_narrow(out.dtype, [&](auto type) {
    each_page(blocks, [&](const QuantizedBlocks& page, unsigned rows, size_t before) {
      const Dequantizing d{reinterpret_cast<const uint8_t*>(packet) + before,
                           out.data,
                           decoding.not_finite,
                           decoding.scale,
                           code_of(blocks.bits),
                           decoding.accumulate};
      launch<dequantize_blocks<typename decltype(type)::type>>(
          "dequantize", {rows, kValueThreads, stream_of(queue)}, d, page);
    });
  });
}

}  // namespace pycomm::cuda
