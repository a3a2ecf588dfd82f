// Element types in kernels: magnitudes as integers, accesses of four elements, rounding.
#pragma once

#include <cstring>
#include <type_traits>

#include "gpu.hpp"

namespace pycomm::cuda {

using Half = __half;
using Bfloat16 = __nv_bfloat16;

// The unsigned integer of the same size.
template <class T>
using Word =
    std::conditional_t<sizeof(T) == 8, uint64_t,
                       std::conditional_t<sizeof(T) == 4, uint32_t,
                                          std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

// The arithmetic type: float64 for float64, else float32.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
__device__ __forceinline__ Wide<T> widen(T x) {
  if constexpr (std::is_same_v<T, Half>) return __half2float(x);
  if constexpr (std::is_same_v<T, Bfloat16>) return __bfloat162float(x);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) return x;
}

// Rounds to nearest even, once; a NaN becomes the quiet NaN of the type.
template <class To, class From>
__device__ __forceinline__ To narrow(From x) {
  if constexpr (std::is_same_v<To, Half>) {
    if (x != x) return bits_as<Half>(uint16_t{0x7e00});
    if constexpr (std::is_same_v<From, double>) return __double2half(x);
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, Bfloat16>) {
    if (x != x) return bits_as<Bfloat16>(uint16_t{0x7fc0});
    if constexpr (std::is_same_v<From, double>) return __double2bfloat16(x);
    return __float2bfloat16_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, double>) {
    return x == x ? static_cast<double>(x) : __longlong_as_double(0x7ff8000000000000ll);
  } else {
    return x == x ? static_cast<float>(x) : __uint_as_float(0x7fc00000u);
  }
}

// Gives a computed NaN the same bits on every device.
__device__ __forceinline__ float canonical(float x) {
  return x == x ? x : __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ double canonical(double x) {
  return x == x ? x : __longlong_as_double(0x7ff8000000000000ll);
}

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// Accesses four elements with one or two 16-byte accesses, or one of 8 or 4 bytes. `p` is aligned
// to all four elements, or to 16 bytes.
template <class T>
struct Quad {
  T at[4];
};

template <class T>
__device__ __forceinline__ Quad<T> load_quad(const T* p) {
  if constexpr (sizeof(T) == 1)
    return bits_as<Quad<T>>(gpu::load(reinterpret_cast<const unsigned*>(p)));
  if constexpr (sizeof(T) == 2)
    return bits_as<Quad<T>>(gpu::load(reinterpret_cast<const uint2*>(p)));
  if constexpr (sizeof(T) == 4)
    return bits_as<Quad<T>>(gpu::load(reinterpret_cast<const uint4*>(p)));
  if constexpr (sizeof(T) == 8) {
    struct Halves {
      uint4 at[2];
    };
    const auto* from = reinterpret_cast<const uint4*>(p);
    return bits_as<Quad<T>>(Halves{{gpu::load(from), gpu::load(from + 1)}});
  }
}

template <class T>
__device__ __forceinline__ void store_quad(T* p, const Quad<T>& value) {
  if constexpr (sizeof(T) == 1)
    gpu::store(reinterpret_cast<unsigned*>(p), bits_as<unsigned>(value));
  if constexpr (sizeof(T) == 2) gpu::store(reinterpret_cast<uint2*>(p), bits_as<uint2>(value));
  if constexpr (sizeof(T) == 4) gpu::store(reinterpret_cast<uint4*>(p), bits_as<uint4>(value));
  if constexpr (sizeof(T) == 8) {
    struct Halves {
      uint4 at[2];
    };
    const auto halves = bits_as<Halves>(value);
    gpu::store(reinterpret_cast<uint4*>(p), halves.at[0]);
    gpu::store(reinterpret_cast<uint4*>(p) + 1, halves.at[1]);
  }
}

// The magnitude of a number: its bits without the sign. As integers they order like the numbers,
// with NaN above infinity.
template <class V>
using Key = std::conditional_t<sizeof(V) == 8, uint64_t, uint32_t>;

template <class V>
inline constexpr unsigned kKeyBits = sizeof(V) * 8 - 1;

template <class V>
__device__ __forceinline__ Key<V> magnitude(V x) {
  return bits_as<Word<V>>(x) & static_cast<Word<V>>(~(Word<V>{1} << kKeyBits<V>));
}
template <class V>
__device__ __forceinline__ V from_magnitude(Key<V> key) {
  return bits_as<V>(static_cast<Word<V>>(key));
}

// A radix select processes keys digit by digit, highest first.
template <class V>
inline constexpr unsigned kDigits = sizeof(V) == 8   ? 6
                                    : sizeof(V) == 4 ? 3
                                                     : 2;

// Expressions without loops: kernels compute them for every key.
template <class V>
__host__ __device__ constexpr unsigned digit_bits(unsigned digit) {
  if (sizeof(V) == 8) return digit < 3 ? 11 : 10;
  if (sizeof(V) == 4) return digit < 1 ? 11 : 10;
  return digit < 1 ? 8 : 7;
}
// The bits below a digit.
template <class V>
__host__ __device__ constexpr unsigned digit_shift(unsigned digit) {
  if (sizeof(V) == 8) return digit < 3 ? 52 - 11 * digit : 50 - 10 * digit;
  return sizeof(V) == 4 ? 20 - 10 * digit : 7 - 7 * digit;
}
// Offset of the bins of a digit in the histograms of a selection. The second digit of the second
// rank follows the last digit.
template <class V>
__host__ __device__ constexpr unsigned first_bin(unsigned digit) {
  if (sizeof(V) == 8) return digit < 3 ? 2048 * digit : 3072 + 1024 * digit;
  return sizeof(V) == 4 ? (digit < 1 ? 0 : 1024 + 1024 * digit) : 256 * digit;
}

template <class V>
constexpr bool digits_fit() {
  unsigned shift = kKeyBits<V>, bin = 0;
  for (unsigned d = 0; d < kDigits<V>; ++d) {
    shift -= digit_bits<V>(d);
    if (digit_shift<V>(d) != shift || first_bin<V>(d) != bin) return false;
    bin += 1u << digit_bits<V>(d);
  }
  return shift == 0 && first_bin<V>(kDigits<V>) >= bin;
}
static_assert(digits_fit<double>() && digits_fit<float>() && digits_fit<Half>());

template <class V>
inline constexpr unsigned kReachBins = first_bin<V>(kDigits<V>);
template <class V>
inline constexpr unsigned kBins = kReachBins<V> + (1u << digit_bits<V>(1));

}  // namespace pycomm::cuda
