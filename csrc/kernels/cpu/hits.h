// Which elements reach a floor, as bits. What is hit rarely costs one branch for all then, and not
// one for each. Called by select.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels/cpu/floats.h"
#include "kernels/cpu/isa.h"

namespace pycomm::cpu {

inline constexpr size_t kGroup = 64;          // elements looked at together
inline constexpr size_t kTile = 16 * kGroup;  // elements worked on while they are in the cache

#ifdef __x86_64__
// A bit for each element whose key is at least the floor. Keys are below 2^31, so signed
// comparisons hold, of a floor of 0 too.
[[gnu::target("avx2")]] inline uint64_t hit_bits_of_group(const float* elements, uint32_t floor) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(floor - 1));
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

// A bit for each group of a tile that has such an element.
[[gnu::target("avx2")]] inline unsigned hit_groups_of_tile(const float* elements, uint32_t floor) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(floor - 1));
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

// hits[i]: 1 where the key of element i is at least the floor, else 0.
template <typename Element>
struct Hits {
  template <Isa>
  [[gnu::always_inline]] static void run(const Element* elements, size_t count,
                                         decltype(key_of(Element{})) floor, uint8_t* hits) {
    if (count == kGroup)
      for (size_t i = 0; i < kGroup; ++i) hits[i] = key_of(elements[i]) >= floor;
    else
      for (size_t i = 0; i < count; ++i) hits[i] = key_of(elements[i]) >= floor;
  }
};

// The same, a bit each: one loop over what was hit has one end to guess for the processor.
template <typename Element>
uint64_t hit_bits(Isa isa, const Element* elements, size_t count,
                  decltype(key_of(Element{})) floor) {
#ifdef __x86_64__
  if constexpr (sizeof(Element) == 4)
    if (isa != Isa::baseline && count == kGroup) return hit_bits_of_group(elements, floor);
#endif
  alignas(8) std::array<uint8_t, kGroup> hits{};
  run_on<Hits<Element>>(isa, elements, count, floor, hits.data());
  uint64_t bits = 0;
  for (size_t begin = 0; begin < kGroup; begin += 8) {
    uint64_t eight;
    std::memcpy(&eight, hits.data() + begin, sizeof eight);
    bits |= (eight * 0x0102040810204080 >> 56) << begin;  // byte i becomes bit i of the top byte
  }
  return bits;
}

}  // namespace pycomm::cpu
