// The n-ary reduction of dense.cu, for kernels that users call and for the stream engine alike.
#pragma once

#include <span>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// `avg` divides by `size`, which is the number of inputs unless some of them are sums already.
struct Reducing {
  ReduceOp op;
  unsigned size;
};

// out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right. Throws Unsupported for more than 1024
// inputs and for pairs without a meaning.
void reduce_into(TypedArray out, std::span<const void* const> xs, Reducing what, Queue queue);

}  // namespace pycomm::cuda
