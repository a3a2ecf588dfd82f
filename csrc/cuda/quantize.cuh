// Quantized arrays on the device: one thread block per block of values. kernels/quantize.h has the
// layout and the contract.
#pragma once

#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

// A block of elements, and its first byte in the packet.
struct QuantizedBlock {
  unsigned offset, count, start;
};

// The blocks of a launch: an argument, so that no table is copied to the device first.
inline constexpr unsigned kMostQuantized = 2600;
struct QuantizedBlocks {
  QuantizedBlock of[kMostQuantized];
};

struct Quantizing {
  const void* x;
  const float* residual;  // may be null
  float* lost;
  uint8_t* packet;  // of the first block
  unsigned code;
};

struct Dequantizing {
  const uint8_t* packet;
  void* out;
  unsigned* not_finite;  // may be null
  float scale;
  unsigned code;
  bool accumulate;
};
static_assert(sizeof(QuantizedBlocks) + sizeof(Dequantizing) <= 32764);

// Grid: one block per block of values. V: type of x.
template <class V>
__global__ void __launch_bounds__(kValueThreads)
    quantize_blocks(const __grid_constant__ Quantizing q,
                    const __grid_constant__ QuantizedBlocks blocks) {
  auto& own = gpu::shared<ValueSpace>().value;
  const QuantizedBlock block = blocks.of[blockIdx.x];
  const V* const x = static_cast<const V*>(q.x) + block.offset;
  const float* const residual = q.residual == nullptr ? nullptr : q.residual + block.offset;
  uint8_t* const to = q.packet + block.start;
  for (unsigned i = threadIdx.x; i < block.count; i += kValueThreads) {
    const float value = widen(gpu::load(x + i));
    own[i] = canonical(residual == nullptr ? value : add(value, gpu::load(residual + i)));
  }
  __syncthreads();
  write_levels(q.code, block.count, to);
  if (residual == nullptr) return;
  __syncthreads();
  const bool finite = has_finite_levels(q.code, to);
  float* const lost = q.lost + block.offset;
  for (unsigned i = threadIdx.x; i < block.count; i += kValueThreads)
    gpu::store(lost + i, finite ? add(own[i], -read_value(q.code, to, i)) : residual[i]);
}

// The same grid. V: type of the output.
template <class V>
__global__ void __launch_bounds__(kValueThreads)
    dequantize_blocks(const __grid_constant__ Dequantizing d,
                      const __grid_constant__ QuantizedBlocks blocks) {
  const QuantizedBlock block = blocks.of[blockIdx.x];
  const uint8_t* const from = d.packet + block.start;
  V* const out = static_cast<V*>(d.out) + block.offset;
  for (unsigned i = threadIdx.x; i < block.count; i += kValueThreads) {
    float value = multiply(read_value(d.code, from, i), d.scale);
    if (d.accumulate) value = add(value, widen(gpu::load(out + i)));
    gpu::store(out + i, narrow<V>(value));
  }
  if (threadIdx.x == 0 && d.not_finite != nullptr && !has_finite_levels(d.code, from))
    atomicOr(d.not_finite, 1u);
}

}  // namespace pycomm::cuda
