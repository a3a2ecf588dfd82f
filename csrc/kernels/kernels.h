// The element-wise reductions of the CPU, and the table that finds them.
//
// Pointers need no alignment (received data has none). `out` may be the same as `a` or `b` but must
// not overlap them otherwise. No function allocates or throws; all are thread-safe.
#pragma once

#include <cstddef>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace pycomm::kernels {

// One reduction of one dtype. float16 and bfloat16 are added in float32 and rounded (to nearest,
// ties to even) once per call. min and max: NaN wins, and -0 is less than +0, so that the operands
// commute. Integers wrap around. bool: sum is or, product is and.
struct Reducer {
  // out[i] = a[i] (+) b[i]
  void (*reduce)(void* out, const void* a, const void* b, size_t count);
  // The same, as the last addition of these elements: avg divides by `size` here.
  void (*finish)(void* out, const void* a, const void* b, size_t count, int size);
  // out[i] = slots[i] (+) slots[count + i] (+) ... over `size` slots, left to right; finished.
  // `out` may be one of the slots.
  void (*fold)(void* out, const void* slots, size_t count, int size);
  // The same, with one pointer per slot.
  void (*join)(void* out, const void* const* slots, size_t count, int size);
};

// Throws Unsupported for an undefined pair: avg of integers or bool, bitwise operations on floats.
const Reducer& reducer(Dtype dtype, ReduceOp op);

}  // namespace pycomm::kernels
