// Finds elements that reach a lower bound, as bits. Rare hits then cost one branch per group
// instead of one per element.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu/floats.h"
#include "cpu/isa.h"

namespace pycomm::kernels {

inline constexpr size_t kGroup = 64;          // elements compared together
inline constexpr size_t kTile = 16 * kGroup;  // elements processed while in the cache

#ifdef __x86_64__
// A bit for each element whose key is at least the lower bound. Keys are below 2^31, so signed
// comparisons are correct, also for the bound 0.
[[gnu::target("avx2")]] inline uint64_t hit_bits_of_group(const float* elements, uint32_t bound) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(bound - 1));
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  uint64_t bits = 0;
  for (size_t i = 0; i < kGroup; i += 8) {
    const auto* const at = reinterpret_cast<const __m256i_u*>(elements + i);
    const __m256i keys = _mm256_and_si256(_mm256_loadu_si256(at), magnitude);
    const __m256i hits = _mm256_cmpgt_epi32(keys, below);
    bits |= uint64_t{static_cast<uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hits)))} << i;
  }
  return bits;
}

[[gnu::target("avx512f")]] inline uint64_t hit_bits_of_group_512(const float* elements,
                                                                 uint32_t bound) {
  const __m512i below = _mm512_set1_epi32(static_cast<int>(bound - 1));
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  uint64_t bits = 0;
  for (size_t i = 0; i < kGroup; i += 16) {
    const __m512i keys = _mm512_and_si512(_mm512_loadu_si512(elements + i), magnitude);
    bits |= uint64_t{_mm512_cmpgt_epi32_mask(keys, below)} << i;
  }
  return bits;
}

// A bit for each group of a tile with such an element.
[[gnu::target("avx2")]] inline unsigned hit_groups_of_tile(const float* elements, uint32_t bound) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(bound - 1));
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  unsigned groups = 0;
  for (size_t begin = 0; begin < kTile; begin += kGroup) {
    __m256i most = _mm256_setzero_si256();
    for (size_t i = begin; i < begin + kGroup; i += 8) {
      const auto* const at = reinterpret_cast<const __m256i_u*>(elements + i);
      most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_loadu_si256(at), magnitude));
    }
    const __m256i hits = _mm256_cmpgt_epi32(most, below);
    groups |= unsigned{_mm256_testz_si256(hits, hits) == 0} << begin / kGroup;
  }
  return groups;
}
#endif

// hits[i]: 1 if the key of element i is at least the lower bound, else 0.
template <typename Element>
struct Hits {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const Element* elements, size_t count,
                                         decltype(cpu::key_of(Element{})) bound, uint8_t* hits) {
    if (count == kGroup)
      for (size_t i = 0; i < kGroup; ++i) hits[i] = cpu::key_of(elements[i]) >= bound;
    else
      for (size_t i = 0; i < count; ++i) hits[i] = cpu::key_of(elements[i]) >= bound;
  }
};

// The same as bits: one loop over the set bits has one exit to predict.
template <typename Element>
uint64_t hit_bits(cpu::Isa isa, const Element* elements, size_t count,
                  decltype(cpu::key_of(Element{})) bound) {
#ifdef __x86_64__
  if constexpr (sizeof(Element) == 4)
    if (isa != cpu::Isa::baseline && count == kGroup)
      return isa == cpu::Isa::avx2 ? hit_bits_of_group(elements, bound)
                                   : hit_bits_of_group_512(elements, bound);
#endif
  alignas(8) std::array<uint8_t, kGroup> hits{};
  cpu::run_on<Hits<Element>>(isa, elements, count, bound, hits.data());
  uint64_t bits = 0;
  for (size_t begin = 0; begin < kGroup; begin += 8) {
    uint64_t eight;
    std::memcpy(&eight, hits.data() + begin, sizeof eight);
    bits |= (eight * 0x0102040810204080 >> 56) << begin;  // byte i becomes bit i of the top byte
  }
  return bits;
}

}  // namespace pycomm::kernels
