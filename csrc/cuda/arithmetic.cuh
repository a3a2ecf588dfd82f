// The arithmetic of reductions, by dtype.
#pragma once

#include <string>

#include "codec/packet.h"
#include "core/errors.h"
#include "cuda/host.hpp"
#include "cuda/numbers.cuh"

namespace pycomm::cuda {

// A bool in memory: any byte except 0 is true.
struct Bool {
  uint8_t byte;
};

template <class T>
inline constexpr bool kIsFloat = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat16> ||
                                 std::is_same_v<T, float> || std::is_same_v<T, double>;

template <class T>
__device__ __forceinline__ auto to_sum(T x) {
  if constexpr (std::is_same_v<T, Bool>)
    return x.byte != 0;
  else if constexpr (kIsFloat<T>)
    return widen(x);
  else
    return x;
}

template <class T, class Sum>
__device__ __forceinline__ T from_sum(ReduceOp op, Sum sum, unsigned size) {
  if constexpr (kIsFloat<T>)
    return narrow<T>(op == ReduceOp::avg ? divide(sum, static_cast<Sum>(size)) : sum);
  else if constexpr (std::is_same_v<T, Bool>)
    return {static_cast<uint8_t>(sum)};
  else
    return sum;
}

// Both operand orders give the same bits: if neither is less, both are equal, or -0 and 0, or one
// is a NaN, and `or` combines their bits.
template <class Real>
__device__ __forceinline__ Real least(Real a, Real b) {
  return bits_as<Real>(static_cast<Word<Real>>(bits_as<Word<Real>>(a < b ? a : b) |
                                               bits_as<Word<Real>>(b < a ? b : a)));
}

__device__ __forceinline__ bool join(ReduceOp op, bool a, bool b) {
  if (op == ReduceOp::bxor) return a != b;
  const bool both = op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band;
  return both ? a && b : a || b;
}

template <class T>
__device__ __forceinline__ T join(ReduceOp op, T a, T b) {
  if constexpr (kIsFloat<T>) {
    if (op == ReduceOp::product) return multiply(a, b);
    if (op == ReduceOp::min) return least(a, b);
    if (op == ReduceOp::max) return -least(-a, -b);
    return add(a, b);
  } else {
    using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    const auto x = static_cast<Wrapping>(a), y = static_cast<Wrapping>(b);
    if (op == ReduceOp::product) return static_cast<T>(x * y);
    if (op == ReduceOp::min) return a < b ? a : b;
    if (op == ReduceOp::max) return a < b ? b : a;
    if (op == ReduceOp::band) return static_cast<T>(x & y);
    if (op == ReduceOp::bor) return static_cast<T>(x | y);
    if (op == ReduceOp::bxor) return static_cast<T>(x ^ y);
    return static_cast<T>(x + y);
  }
}

// Calls f(Type<T>{}) for the element type of any dtype.
template <class F>
void with_any(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::int8:
      return f(Type<int8_t>{});
    case Dtype::int16:
      return f(Type<int16_t>{});
    case Dtype::int32:
      return f(Type<int32_t>{});
    case Dtype::int64:
      return f(Type<int64_t>{});
    case Dtype::uint8:
      return f(Type<uint8_t>{});
    case Dtype::boolean:
      return f(Type<Bool>{});
    case Dtype::float16:
    case Dtype::bfloat16:
    case Dtype::float32:
    case Dtype::float64:
      return with_float(dtype, f);
  }
}

// Throws Unsupported for an undefined pair.
inline void check_defined(Dtype dtype, ReduceOp op) {
  const bool bits = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (codec::is_float(dtype) ? bits : op == ReduceOp::avg)
    throw Unsupported(std::string(name_of(op)) + " is not defined for " +
                      std::string(name_of(dtype)));
}

}  // namespace pycomm::cuda
