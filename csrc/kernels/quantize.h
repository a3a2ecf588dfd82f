// Quantization of whole arrays: few bits for each value, and levels for each block. A
// packet is the blocks in their order, without a header:
//
//   1, 2, 3 bits   the codes "1bit", "2bit" and "3bit" of codec/compact.h
//   4 bits         as "3bit", with eight instead of four steps of the exponent
//   8 bits         step, a float32: the largest magnitude / 127; then an int8 each: the value /
//   step,
//                  rounded to nearest even. If step is not finite, all values are NaN
//
// A block with a non-finite value decodes to NaN everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pycomm::kernels {

// `count` consecutive elements, at most 4096, that share levels. Blocks do not overlap. A row of
// 64-bit words, from Python.
struct Block {
  uint64_t offset;
  uint64_t count;
};

// Bits per value: 1, 2, 3, 4 or 8.
struct Blocks {
  std::span<const Block> blocks;
  unsigned bits;
};
size_t quantized_bytes(const Blocks& blocks);

// Error feedback: t = x + residual in float32 is encoded, and lost = t - decoded t. Without a
// residual t = x. `lost` may be `residual`; both or neither are null. Where a block of t is not
// finite, lost = residual.
struct Feedback {
  const float* residual;
  float* lost;
};

// out[i] = scale * decoded, or out[i] + scale * decoded, in float32, for the elements of the
// blocks. Any bytes are valid.
struct Decoding {
  float scale;
  bool accumulate;
  uint32_t* not_finite;  // [1], on the device: 1 if a block is not finite; may be null
};

}  // namespace pycomm::kernels
