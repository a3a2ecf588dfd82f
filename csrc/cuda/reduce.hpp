// The n-ary reduction of dense.cu, for user kernels and the stream engine.
#pragma once

#include <span>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// `avg` divides by `size`: the number of inputs, or more if some inputs are partial sums.
struct Reducing {
  ReduceOp op;
  unsigned size;
};

// out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right. Throws Unsupported for more than 1024
// inputs and for undefined pairs.
void reduce_into(kernels::TypedArray out, std::span<const void* const> xs, Reducing what,
                 kernels::Queue queue);

}  // namespace pycomm::cuda
