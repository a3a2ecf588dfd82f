// Converts between elements in memory and a buffer of values in the L1 cache. float16 uses F16C
// instructions if available. Included by loops.h only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu/arithmetic.h"
#include "cpu/isa.h"

namespace pycomm::kernels {

template <cpu::Isa kIsa, Dtype kDtype>
struct Chunk {
  [[gnu::always_inline]] static void read(cpu::Value<kDtype>* to, const void* from, size_t begin,
                                          size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = cpu::load<kDtype>(from, begin + i);
  }
  [[gnu::always_inline]] static void write(void* to, const cpu::Value<kDtype>* from, size_t begin,
                                           size_t count) {
    for (size_t i = 0; i < count; ++i) cpu::store<kDtype>(to, begin + i, from[i]);
  }
};

#ifdef __x86_64__
template <>
struct Chunk<cpu::Isa::avx2, Dtype::float16> {
  [[gnu::target("avx2,f16c")]] static void read(float* to, const void* from, size_t begin,
                                                size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const auto* at = static_cast<const std::byte*>(from) + (begin + i) * sizeof(uint16_t);
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(at));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
    }
    for (; i < count; ++i) to[i] = cpu::load<Dtype::float16>(from, begin + i);
  }

  [[gnu::target("avx2,f16c")]] static void write(void* to, const float* from, size_t begin,
                                                 size_t count) {
    const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256 values = _mm256_loadu_ps(from + i);
      const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
      const __m128i halves =
          _mm256_cvtps_ph(_mm256_blendv_ps(values, nan, is_nan), _MM_FROUND_TO_NEAREST_INT);
      auto* at = static_cast<std::byte*>(to) + (begin + i) * sizeof(uint16_t);
      _mm_storeu_si128(reinterpret_cast<__m128i_u*>(at), halves);
    }
    for (; i < count; ++i) cpu::store<Dtype::float16>(to, begin + i, from[i]);
  }
};
template <>
struct Chunk<cpu::Isa::avx512, Dtype::float16> : Chunk<cpu::Isa::avx2, Dtype::float16> {};
#endif

}  // namespace pycomm::kernels
