// Conversion of float16 and bfloat16 to and from float32, with branch-free integer operations, so
// that loops vectorize on any processor. chunk.h uses float16 instructions if available, with the
// same bits.
//
// Widening is exact. Narrowing rounds to nearest, ties to even, once: subnormals are kept, overflow
// becomes infinity, and every NaN becomes one quiet NaN (sign clear, payload zero).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace pycomm::cpu {

// A NaN's payload depends on the operand order and the processor; this NaN does not.
template <typename Float>
[[gnu::always_inline]] inline Float with_one_nan(Float value) {
  return value != value ? std::numeric_limits<Float>::quiet_NaN() : value;
}

// Uses a mask: with ?: the compiler branches, and the loop stays scalar. All integers are signed,
// because old vector instructions compare signed integers only.
[[gnu::always_inline]] inline int32_t select(bool condition, int32_t yes, int32_t no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

[[gnu::always_inline]] inline float widen_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

[[gnu::always_inline]] inline uint16_t narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(with_one_nan(value));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline constexpr int32_t kHalfBias = (127 - 15) << 23;            // bias difference
inline constexpr int32_t kHalfNormal = kHalfBias + (1 << 23);     // 2^-14, smallest normal float16
inline constexpr int32_t kHalfInfinity = kHalfBias + (31 << 23);  // 2^16, beyond float16

[[gnu::always_inline]] inline float widen_float16(uint16_t bits) {
  const int32_t magnitude = (bits & 0x7fff) << 13;
  const int32_t normal = magnitude + kHalfBias + select(magnitude >= 31 << 23, kHalfBias, 0);
  // The bits of a subnormal with the exponent of 2^-14 read 2^-14 too large; the difference is
  // exact.
  const auto subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude + kHalfNormal) -
                                                std::bit_cast<float>(kHalfNormal));
  const auto any = static_cast<uint32_t>(select(magnitude < 1 << 23, subnormal, normal));
  return std::bit_cast<float>(any | static_cast<uint32_t>(bits & 0x8000) << 16);
}

[[gnu::always_inline]] inline uint16_t narrow_float16(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t limited = select(magnitude < kHalfInfinity, magnitude, kHalfInfinity);
  const int32_t normal = (limited - kHalfBias + 0xfff + (limited >> 13 & 1)) >> 13;
  // Near 0.5 a float32 has the spacing of subnormal float16, 2^-24, so the addition rounds.
  const int32_t subnormal =
      std::bit_cast<int32_t>(std::bit_cast<float>(limited) + 0.5f) - std::bit_cast<int32_t>(0.5f);
  const int32_t number = select(limited < kHalfNormal, subnormal, normal);
  const int32_t with_sign = number | (bits >> 16 & 0x8000);
  return static_cast<uint16_t>(select(magnitude > 255 << 23, 0x7e00, with_sign));
}

}  // namespace pycomm::cpu
