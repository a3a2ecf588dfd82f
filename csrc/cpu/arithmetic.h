// One operation on one element: load, combine, divide, store. The loops are in loops.h.
//
// Every function gives the same bits for every compiler and vector width, and with operands
// swapped:
//   * no expression multiplies and then adds, so none can be contracted to a fused multiply-add;
//     the build also uses -ffp-contract=off, and never -ffast-math;
//   * a NaN is stored as one quiet NaN, because its payload would depend on the operand order;
//   * loads and stores use memcpy, because pointers need no alignment.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "cpu/half.h"

namespace pycomm::cpu {

#ifdef __FAST_MATH__
#error "NaN and -0 have a meaning here: build without -ffast-math"
#endif

// `Stored` is the type in memory, `Value` the type of the computation.
template <Dtype>
struct Element;
template <typename T, typename V = T>
struct ElementOf {
  using Stored = T;
  using Value = V;
};
template <>
struct Element<Dtype::float16> : ElementOf<uint16_t, float> {};
template <>
struct Element<Dtype::bfloat16> : ElementOf<uint16_t, float> {};
template <>
struct Element<Dtype::float32> : ElementOf<float> {};
template <>
struct Element<Dtype::float64> : ElementOf<double> {};
template <>
struct Element<Dtype::int8> : ElementOf<int8_t> {};
template <>
struct Element<Dtype::int16> : ElementOf<int16_t> {};
template <>
struct Element<Dtype::int32> : ElementOf<int32_t> {};
template <>
struct Element<Dtype::int64> : ElementOf<int64_t> {};
template <>
struct Element<Dtype::uint8> : ElementOf<uint8_t> {};
template <>
struct Element<Dtype::boolean> : ElementOf<uint8_t> {};

template <Dtype kDtype>
using Stored = typename Element<kDtype>::Stored;
template <Dtype kDtype>
using Value = typename Element<kDtype>::Value;

constexpr bool is_bits(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

template <Dtype kDtype>
inline constexpr bool kIsFloat = std::is_floating_point_v<Value<kDtype>>;

template <Dtype kDtype, ReduceOp kOp>
inline constexpr bool kHasMeaning = kIsFloat<kDtype> ? !is_bits(kOp) : kOp != ReduceOp::avg;

template <Dtype kDtype>
[[gnu::always_inline]] inline Value<kDtype> load(const void* from, size_t i) {
  Stored<kDtype> stored;
  std::memcpy(&stored, static_cast<const std::byte*>(from) + i * sizeof stored, sizeof stored);
  if constexpr (kDtype == Dtype::float16)
    return widen_float16(stored);
  else if constexpr (kDtype == Dtype::bfloat16)
    return widen_bfloat16(stored);
  else if constexpr (kDtype == Dtype::boolean)
    return stored != 0;
  else
    return stored;
}

template <Dtype kDtype>
[[gnu::always_inline]] inline void store(void* to, size_t i, Value<kDtype> value) {
  Stored<kDtype> stored;
  if constexpr (kDtype == Dtype::float16)
    stored = narrow_float16(value);
  else if constexpr (kDtype == Dtype::bfloat16)
    stored = narrow_bfloat16(value);
  else if constexpr (kIsFloat<kDtype>)
    stored = with_one_nan(value);
  else
    stored = value;
  std::memcpy(static_cast<std::byte*>(to) + i * sizeof stored, &stored, sizeof stored);
}

// Minimum of two floats. If neither is less, either both are equal, and `or` distinguishes -0 from
// 0; or one is NaN, and `or` keeps the exponent of ones and a bit of the payload. So both operand
// orders give one answer.
template <typename Float>
[[gnu::always_inline]] inline Float least(Float a, Float b) {
  using Bits = std::conditional_t<sizeof(Float) == 4, uint32_t, uint64_t>;
  return std::bit_cast<Float>(std::bit_cast<Bits>(a < b ? a : b) |
                              std::bit_cast<Bits>(b < a ? b : a));
}

template <ReduceOp kOp, typename Float>
  requires std::is_floating_point_v<Float>
[[gnu::always_inline]] inline Float combine(Float a, Float b) {
  if constexpr (kOp == ReduceOp::product)
    return a * b;
  else if constexpr (kOp == ReduceOp::min)
    return least(a, b);
  else if constexpr (kOp == ReduceOp::max)
    return -least(-a, -b);
  else
    return a + b;
}

template <ReduceOp kOp, typename Integer>
  requires std::is_integral_v<Integer>
[[gnu::always_inline]] inline Integer combine(Integer a, Integer b) {
  // Unsigned, because it wraps; at least as wide as int, because a narrower type would be promoted
  // to signed.
  using Wrapping = std::common_type_t<unsigned, std::make_unsigned_t<Integer>>;
  const auto x = static_cast<Wrapping>(a), y = static_cast<Wrapping>(b);
  if constexpr (kOp == ReduceOp::product)
    return static_cast<Integer>(x * y);
  else if constexpr (kOp == ReduceOp::min)
    return std::min(a, b);
  else if constexpr (kOp == ReduceOp::max)
    return std::max(a, b);
  else if constexpr (kOp == ReduceOp::band)
    return static_cast<Integer>(x & y);
  else if constexpr (kOp == ReduceOp::bor)
    return static_cast<Integer>(x | y);
  else if constexpr (kOp == ReduceOp::bxor)
    return static_cast<Integer>(x ^ y);
  else
    return static_cast<Integer>(x + y);
}

// For bool, sum is `or` and product is `and`.
constexpr ReduceOp as_bit_operation(ReduceOp op) {
  if (op == ReduceOp::sum || op == ReduceOp::max) return ReduceOp::bor;
  if (op == ReduceOp::product || op == ReduceOp::min) return ReduceOp::band;
  return op;
}

template <Dtype kDtype, ReduceOp kOp>
inline constexpr ReduceOp kOpOf = kDtype == Dtype::boolean ? as_bit_operation(kOp) : kOp;

// Applied after the last addition. A division, because a product with 1/size would round twice.
template <ReduceOp kOp, typename V>
[[gnu::always_inline]] inline V last(V value, int size) {
  if constexpr (kOp == ReduceOp::avg)
    return value / static_cast<V>(size);
  else
    return value;
}

}  // namespace pycomm::cpu
