// Vectors of float16 and bfloat16 elements, as two vectors of float32, for loops.h only. They give
// the bits of cpu/half.h.
//
// Functions with instructions of one set have its target. They take vectors by reference, because
// the loop that calls them has no target, and no vector registers, until it is inlined (isa.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "cpu/isa.h"

namespace pycomm::kernels {

// The elements of kBytes bytes, each half of them in one vector.
template <size_t kBytes>
struct HalfValues {
  using Floats [[gnu::vector_size(kBytes)]] = float;
  using Words [[gnu::vector_size(kBytes)]] = uint32_t;
  Floats first, second;
};

// Whether an element may be a NaN. A branch on it is cheaper than the replacement of every vector.
#ifdef __x86_64__
inline bool any_nan(const HalfValues<16>& values) {
  return _mm_movemask_ps(_mm_cmpunord_ps(values.first, values.second)) != 0;
}
[[gnu::target("avx2")]] inline bool any_nan(const HalfValues<32>& values) {
  return _mm256_movemask_ps(_mm256_cmp_ps(values.first, values.second, _CMP_UNORD_Q)) != 0;
}
[[gnu::target("avx512f")]] inline bool any_nan(const HalfValues<64>& values) {
  return _mm512_cmp_ps_mask(values.first, values.second, _CMP_UNORD_Q) != 0;
}
#else
constexpr bool any_nan(const HalfValues<16>&) { return true; }
#endif

template <size_t kBytes>
[[gnu::always_inline]] inline void make_one_nan(HalfValues<kBytes>& values) {
  using Floats = typename HalfValues<kBytes>::Floats;
  if (!any_nan(values)) [[likely]]
    return;
  const Floats nan = std::numeric_limits<float>::quiet_NaN() - Floats{};
  values.first = values.first == values.first ? values.first : nan;
  values.second = values.second == values.second ? values.second : nan;
}

// Even elements are the low halves of 32-bit words, and odd elements the high halves. So neither
// widening nor narrowing moves an element to another word.
template <size_t kBytes>
struct Bfloat16Vector {
  using Values = HalfValues<kBytes>;
  using Words = typename Values::Words;
  using Floats = typename Values::Floats;

  [[gnu::always_inline]] static void read(Values& to, const std::byte* from) {
    Words words;
    std::memcpy(&words, from, kBytes);
    to.first = reinterpret_cast<Floats>(words << 16);
    to.second = reinterpret_cast<Floats>(words & kHigh);
  }
  [[gnu::always_inline]] static void write(std::byte* to, Values& values) {
    make_one_nan(values);
    auto first = reinterpret_cast<Words>(values.first);
    auto second = reinterpret_cast<Words>(values.second);
    first += (first >> 16 & 1) + kBelowHalf;
    second += (second >> 16 & 1) + kBelowHalf;
    const Words words = first >> 16 | (second & kHigh);
    std::memcpy(to, &words, kBytes);
  }

 private:
  static constexpr uint32_t kHigh = 0xffff0000, kBelowHalf = 0x7fff;
};

// kBytes 0: no vectors; the compiler vectorizes loops over cpu/half.h.
template <cpu::Isa, Dtype>
struct HalfVector {
  static constexpr size_t kBytes = 0;
};

template <>
struct HalfVector<cpu::Isa::baseline, Dtype::bfloat16> : Bfloat16Vector<16> {
  static constexpr size_t kBytes = 16;
};

#ifdef __x86_64__
template <>
struct HalfVector<cpu::Isa::avx2, Dtype::bfloat16> : Bfloat16Vector<32> {
  static constexpr size_t kBytes = 32;
};
template <>
struct HalfVector<cpu::Isa::avx512, Dtype::bfloat16> : Bfloat16Vector<64> {
  static constexpr size_t kBytes = 64;
};

// The instruction takes subnormals for zeros, and keeps the payload of a NaN: such vectors are
// rounded without it.
template <>
struct HalfVector<cpu::Isa::avx512_bf16, Dtype::bfloat16>
    : HalfVector<cpu::Isa::avx512, Dtype::bfloat16> {
  [[gnu::target("avx512bf16,avx512bw,avx512dq")]] static void write(std::byte* to, Values& values) {
    constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignalingNan = 0x80;
    constexpr int kOther = kQuietNan | kSubnormal | kSignalingNan;
    const __mmask16 first = _mm512_fpclass_ps_mask(values.first, kOther);
    const __mmask16 second = _mm512_fpclass_ps_mask(values.second, kOther);
    if ((first | second) != 0) [[unlikely]]
      return Bfloat16Vector<kBytes>::write(to, values);
    using Shorts [[gnu::vector_size(kBytes)]] = uint16_t;
    const auto in_turn = reinterpret_cast<__m512i>(
        Shorts{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values.second, values.first));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(in_turn, halves));
  }
};

template <>
struct HalfVector<cpu::Isa::avx2, Dtype::float16> {
  static constexpr size_t kBytes = 32;
  using Values = HalfValues<kBytes>;

  [[gnu::target("avx2,f16c")]] static void read(Values& to, const std::byte* from) {
    const auto* const at = reinterpret_cast<const __m128i_u*>(from);
    to.first = _mm256_cvtph_ps(_mm_loadu_si128(at));
    to.second = _mm256_cvtph_ps(_mm_loadu_si128(at + 1));
  }
  [[gnu::target("avx2,f16c")]] static void write(std::byte* to, Values& values) {
    make_one_nan(values);
    auto* const at = reinterpret_cast<__m128i_u*>(to);
    _mm_storeu_si128(at, _mm256_cvtps_ph(values.first, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(at + 1, _mm256_cvtps_ph(values.second, _MM_FROUND_TO_NEAREST_INT));
  }
};

template <>
struct HalfVector<cpu::Isa::avx512, Dtype::float16> {
  static constexpr size_t kBytes = 64;
  using Values = HalfValues<kBytes>;

  [[gnu::target("avx512f")]] static void read(Values& to, const std::byte* from) {
    const auto* const at = reinterpret_cast<const __m256i_u*>(from);
    to.first = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(at));
    to.second = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(at + 1));
  }
  [[gnu::target("avx512f")]] static void write(std::byte* to, Values& values) {
    make_one_nan(values);
    auto* const at = reinterpret_cast<__m256i_u*>(to);
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
    _mm256_storeu_si256(at, _mm512_maskz_cvtps_ph(kAll, values.first, kNearest));
    _mm256_storeu_si256(at + 1, _mm512_maskz_cvtps_ph(kAll, values.second, kNearest));
  }

 private:
  // g++ 12 reports the intrinsics without a mask as uses of uninitialized memory.
  static constexpr __mmask16 kAll = 0xffff;
};

// The sum in float32, rounded to float16, is the sum in float16: 24 digits are twice 11 and two
// more, so the second rounding sees what the first one saw.
template <>
struct HalfVector<cpu::Isa::avx512_fp16, Dtype::float16>
    : HalfVector<cpu::Isa::avx512, Dtype::float16> {
  using Words = Values::Words;

  [[gnu::target("avx512fp16,avx512bw")]] static void add(Words& a, const Words& b) {
    const __m512h sum = _mm512_add_ph(reinterpret_cast<__m512h>(a), reinterpret_cast<__m512h>(b));
    const __mmask32 is_nan = _mm512_cmp_ph_mask(sum, sum, _CMP_UNORD_Q);
    a = reinterpret_cast<Words>(
        _mm512_mask_mov_epi16(_mm512_castph_si512(sum), is_nan, _mm512_set1_epi16(0x7e00)));
  }
};
#elif defined(__aarch64__)
template <>
struct HalfVector<cpu::Isa::baseline, Dtype::float16> {
  static constexpr size_t kBytes = 16;
  using Values = HalfValues<kBytes>;

  static void read(Values& to, const std::byte* from) {
    float16x8_t halves;
    std::memcpy(&halves, from, kBytes);
    to.first = vcvt_f32_f16(vget_low_f16(halves));
    to.second = vcvt_high_f32_f16(halves);
  }
  static void write(std::byte* to, Values& values) {
    make_one_nan(values);
    const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(values.first), values.second);
    std::memcpy(to, &halves, kBytes);
  }
};
#endif

template <typename Floats>
[[gnu::always_inline]] inline void take_least(Floats& a, const Floats& b) {
  using Words [[gnu::vector_size(sizeof(Floats))]] = uint32_t;
  a = reinterpret_cast<Floats>(reinterpret_cast<Words>(a < b ? a : b) |
                               reinterpret_cast<Words>(b < a ? b : a));
}

// combine() of cpu/arithmetic.h for vectors.
template <ReduceOp kOp, typename Floats>
[[gnu::always_inline]] inline void combine_into(Floats& a, const Floats& b) {
  if constexpr (kOp == ReduceOp::product) {
    a *= b;
  } else if constexpr (kOp == ReduceOp::min) {
    take_least(a, b);
  } else if constexpr (kOp == ReduceOp::max) {
    a = -a;
    take_least<Floats>(a, -b);
    a = -a;
  } else {
    a += b;
  }
}

// out = the slots, combined in float32 from the first to the last, finished and rounded once. `out`
// may be one of the slots.
template <cpu::Isa kIsa, Dtype kDtype, ReduceOp kOp>
struct HalfLoop {
  static constexpr size_t kBytes = HalfVector<kIsa, kDtype>::kBytes;

  // slot(i): the first element of slot i. avg divides by `size`.
  template <typename Slot>
  [[gnu::always_inline]] static void run(void* out, const Slot& slot, size_t count, int slots,
                                         int size) {
    const size_t bytes = count * sizeof(uint16_t);
    auto* const to = static_cast<std::byte*>(out);
    const auto at = [&](int i, size_t offset) {
      return static_cast<const std::byte*>(slot(i)) + offset;
    };
    size_t done = 0;
    for (; done + kBytes <= bytes; done += kBytes)
      step(to + done, [&](int i) { return at(i, done); }, slots, size);
    if (done == bytes) return;
    std::array<std::byte, kBytes> rest{};
    const auto padded = [&](int i) {
      std::memcpy(rest.data(), at(i, done), bytes - done);
      return rest.data();
    };
    std::array<std::byte, kBytes> result;
    step(result.data(), padded, slots, size);
    std::memcpy(to + done, result.data(), bytes - done);
  }

 private:
  template <typename From>
  [[gnu::always_inline]] static void step(std::byte* to, const From& from, int slots, int size) {
    using Vector = HalfVector<kIsa, kDtype>;
    if constexpr (kOp == ReduceOp::sum && requires { &Vector::add; })
      if (slots == 2) return add_two(to, from);
    typename Vector::Values values, next;
    Vector::read(values, from(0));
    for (int i = 1; i < slots; ++i) {
      Vector::read(next, from(i));
      combine_into<kOp>(values.first, next.first);
      combine_into<kOp>(values.second, next.second);
    }
    if constexpr (kOp == ReduceOp::avg) {
      values.first /= static_cast<float>(size);
      values.second /= static_cast<float>(size);
    }
    Vector::write(to, values);
  }

  template <typename From>
  [[gnu::always_inline]] static void add_two(std::byte* to, const From& from) {
    typename HalfValues<kBytes>::Words sum, other;
    std::memcpy(&sum, from(0), kBytes);
    std::memcpy(&other, from(1), kBytes);
    HalfVector<kIsa, kDtype>::add(sum, other);
    std::memcpy(to, &sum, kBytes);
  }
};

}  // namespace pycomm::kernels
