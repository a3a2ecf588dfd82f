// Quantization, block by block: a block stays in the L1 cache, so memory is read and written once.
#include "kernels/quantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "codec/cpu/value_codes.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

using Values = std::array<float, codec::kValueBlock>;

constexpr size_t kBlocksPerTask = 16;

// t = x + residual; the residual may be null.
template <Dtype kDtype>
struct AddResidual {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(const void* x, const float* residual, size_t count,
                                         float* t) {
    Chunk<kIsa, kDtype>::read(t, x, 0, count);
    if (residual != nullptr)
      for (size_t i = 0; i < count; ++i) t[i] += residual[i];
    for (size_t i = 0; i < count; ++i) t[i] = cpu::with_one_nan(t[i]);
  }
};

struct Subtract {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* t, const float* sent, size_t count,
                                         float* lost) {
    for (size_t i = 0; i < count; ++i) lost[i] = t[i] - sent[i];
  }
};

template <Dtype kDtype>
struct Write {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(float* values, size_t count, Decoding decoding,
                                         void* out) {
    for (size_t i = 0; i < count; ++i) values[i] *= decoding.scale;
    if (decoding.accumulate)
      for (size_t i = 0; i < count; ++i) values[i] += cpu::load<kDtype>(out, i);
    Chunk<kIsa, kDtype>::write(out, values, 0, count);
  }
};

template <typename Pointer>
auto element(Pointer* array, size_t i, Dtype dtype) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const std::byte, std::byte>;
  return static_cast<Byte*>(array) + i * bytes_of(dtype);
}

// Calls f(block, its offset in the packet) for each block, on several threads.
template <typename F>
void by_blocks(const Blocks& all, F&& f) {
  std::vector<size_t> starts(all.blocks.size());
  size_t bytes = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    starts[i] = bytes;
    bytes += codec::level_block_bytes(all.bits, all.blocks[i].count);
  }
  parallel((starts.size() + kBlocksPerTask - 1) / kBlocksPerTask, [&](size_t task) {
    const cpu::ExactFloats exact;
    const size_t end = std::min(starts.size(), (task + 1) * kBlocksPerTask);
    for (size_t i = task * kBlocksPerTask; i < end; ++i) f(all.blocks[i], starts[i]);
  });
}

}  // namespace

size_t quantized_bytes(const Blocks& blocks) {
  size_t bytes = 0;
  for (const Block& block : blocks.blocks)
    bytes += codec::level_block_bytes(blocks.bits, block.count);
  return bytes;
}

void CpuKernels::quantize(TypedArray x, const Blocks& blocks, Feedback feedback, std::byte* out,
                          Queue) {
  const cpu::Isa isa = cpu::isa_here();
  visit_float(x.dtype, [&](auto dtype) {
    if constexpr (dtype() != Dtype::float64)
      by_blocks(blocks, [&](Block block, size_t start) {
        const size_t n = block.count;
        alignas(64) Values t;
        const float* residual = feedback.residual;
        if (residual != nullptr) residual += block.offset;
        cpu::run_on<AddResidual<dtype()>, const void*>(isa, element(x.data, block.offset, x.dtype),
                                                       residual, n, t.data());
        codec::write_levels(blocks.bits, std::span(t).first(n), out + start);
        if (residual == nullptr) return;
        float* const lost = feedback.lost + block.offset;
        if (!codec::has_finite_levels(blocks.bits, out + start)) {
          std::copy_n(residual, lost == residual ? 0 : n, lost);
          return;
        }
        alignas(64) Values sent;
        codec::read_levels(blocks.bits, out + start, std::span(sent).first(n));
        cpu::run_on<Subtract>(isa, t.data(), sent.data(), n, lost);
      });
  });
}

void CpuKernels::dequantize(const std::byte* packet, const Blocks& blocks, const Decoding& decoding,
                            TypedArray out, Queue) {
  const cpu::Isa isa = cpu::isa_here();
  std::atomic<bool> finite{true};
  visit_float(out.dtype, [&](auto dtype) {
    if constexpr (dtype() != Dtype::float64)
      by_blocks(blocks, [&](Block block, size_t start) {
        alignas(64) Values values;
        codec::read_levels(blocks.bits, packet + start, std::span(values).first(block.count));
        if (!codec::has_finite_levels(blocks.bits, packet + start))
          finite.store(false, std::memory_order_relaxed);
        cpu::run_on<Write<dtype()>, float*, size_t, Decoding, void*>(
            isa, values.data(), block.count, decoding, element(out.data, block.offset, out.dtype));
      });
  });
  if (decoding.not_finite != nullptr && !finite) *decoding.not_finite = 1;
}

}  // namespace pycomm::kernels
