// Operations of the sparse-training kernels on one float: magnitude as an integer, arithmetic
// dtype, rounding of inputs and outputs.
#pragma once

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "cpu/arithmetic.h"

namespace pycomm::cpu {

// The unsigned integer with the width of the element.
template <Dtype kDtype>
using Bits =
    std::conditional_t<sizeof(Stored<kDtype>) == 2, uint16_t,
                       std::conditional_t<sizeof(Stored<kDtype>) == 4, uint32_t, uint64_t>>;

// The element without its sign: integers order like magnitudes, with NaN above infinity.
template <typename Element>
[[gnu::always_inline]] constexpr auto key_of(Element element) {
  using Key = std::conditional_t<sizeof(Element) == 2, uint16_t,
                                 std::conditional_t<sizeof(Element) == 4, uint32_t, uint64_t>>;
  return static_cast<Key>(std::bit_cast<Key>(element) & std::numeric_limits<Key>::max() >> 1);
}

template <typename Float>
[[gnu::always_inline]] inline bool is_finite(Float value) {
  constexpr auto kInfinity = key_of(std::numeric_limits<Float>::infinity());
  return key_of(value) < kInfinity;
}

// Converts a double, or any float, to an element of kDtype, rounded once. The path to a 16-bit
// float is via float32 rounded to odd: towards zero, with the last bit set if the result is
// inexact. So the second rounding detects on which side of the midpoint the number is.
template <Dtype kDtype, typename From>
[[gnu::always_inline]] inline void store_rounded(void* to, size_t i, From value) {
  if constexpr (is_half(kDtype) && std::is_same_v<From, double>) {
    auto rounded = static_cast<float>(value);
    if (static_cast<double>(rounded) != value && value == value) {
      const bool away = std::fabs(static_cast<double>(rounded)) > std::fabs(value);
      rounded = std::bit_cast<float>((std::bit_cast<uint32_t>(rounded) - (away ? 1 : 0)) | 1);
    }
    store<kDtype>(to, i, rounded);
  } else {
    store<kDtype>(to, i, static_cast<Value<kDtype>>(value));
  }
}

// During its lifetime the thread rounds to nearest and keeps subnormals, whatever the program has
// set.
class ExactFloats {
 public:
#ifdef __x86_64__
  ExactFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~ExactFloats() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  ExactFloats() : before_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
  ~ExactFloats() { __builtin_aarch64_set_fpcr(before_); }
#else
#error "pycomm: unsupported processor family: no access to its floating-point control register"
#endif
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;

 private:
  unsigned before_;
};

}  // namespace pycomm::cpu
