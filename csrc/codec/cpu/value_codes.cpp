// The value codes. The order of arithmetic is that of compact.h and the reference: sums over a
// block use float64, in 128 lanes that are then added in pairs.
#include "codec/cpu/value_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/dtype.h"
#include "cpu/floats.h"
#include "cpu/isa.h"

namespace pycomm::codec {
namespace {

constexpr size_t kLanes = 128;
constexpr int kRefinements = 2;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint16_t kLargestLevel = 0x7f7f;  // finite bfloat16

using Block = std::array<float, kValueBlock>;

// ---- levels -------------------------------------------------------------------------------------

// The magnitudes of a block, and whether all are finite.
struct Magnitudes {
  alignas(64) Block value;
  bool finite;

  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, size_t n, Magnitudes* found) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t key = cpu::key_of(values[i]);
      found->value[i] = std::bit_cast<float>(key);
      largest = std::max(largest, key);
    }
    found->finite = cpu::is_finite(std::bit_cast<float>(largest));
  }
  explicit Magnitudes(std::span<const float> values) {
    cpu::run_on<Magnitudes>(cpu::isa_here(), values.data(), values.size(), this);
  }
};

// Sums of the magnitudes up to a limit and above it, and the number above.
struct Split {
  double below = 0, above = 0;
  size_t count_above = 0;
};

// All bits set if a float is above the limit. Branch-free, because the result is unpredictable.
[[gnu::always_inline]] inline uint32_t mask_above(float magnitude, float limit) {
  return -static_cast<uint32_t>(magnitude > limit);
}

struct SplitAt {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* magnitudes, size_t n, float limit,
                                         Split* split) {
    std::array<double, kLanes> below{}, above{};
    uint32_t count = 0;
    for (size_t first = 0; first < n; first += kLanes) {
      const size_t lanes = std::min(kLanes, n - first);
      for (size_t lane = 0; lane < lanes; ++lane) {
        const float magnitude = magnitudes[first + lane];
        const auto bits = std::bit_cast<uint32_t>(magnitude);
        const uint32_t mask = mask_above(magnitude, limit);
        below[lane] += static_cast<double>(std::bit_cast<float>(bits & ~mask));
        above[lane] += static_cast<double>(std::bit_cast<float>(bits & mask));
        count += mask & 1;
      }
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2)
      for (size_t lane = 0; lane < half; ++lane) {
        below[lane] += below[lane + half];
        above[lane] += above[lane + half];
      }
    *split = {below[0], above[0], count};
  }
};

Split split_at(const Magnitudes& magnitudes, size_t n, float limit) {
  Split split;
  cpu::run_on<SplitAt>(cpu::isa_here(), magnitudes.value.data(), n, limit, &split);
  return split;
}

// The largest float32 up to a limit; it separates the same float32 values.
float limit_of(double limit) {
  const auto near = static_cast<float>(limit);
  return static_cast<double>(near) > limit ? std::nextafter(near, 0.0f) : near;
}

// Encodes a level: rounded to float32, then to bfloat16, and never up to infinity.
uint16_t level_of(double mean) {
  return std::min(cpu::narrow_bfloat16(static_cast<float>(mean)), kLargestLevel);
}

constexpr float kEverything = std::numeric_limits<float>::infinity();

// One byte per value: its sign, and in the next bit whether its magnitude is above a limit.
struct Signs {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, size_t n, float limit,
                                         uint8_t* codes) {
    for (size_t i = 0; i < n; ++i) {
      const auto bits = std::bit_cast<uint32_t>(values[i]);
      const uint32_t high = mask_above(std::bit_cast<float>(bits & 0x7fffffff), limit) & 2;
      codes[i] = static_cast<uint8_t>(bits >> 31 | high);
    }
  }
};

// Packs the lowest kBits of each of 8 codes.
template <unsigned kBits>
uint64_t packed(const uint8_t* codes) {
  uint64_t eight;
  std::memcpy(&eight, codes, sizeof eight);
  // The upper byte of the product has the lowest bit of each byte, in order.
  if constexpr (kBits == 1) return eight * 0x0102040810204080 >> 56;
  eight |= eight >> (8 - kBits);  // in pairs, then pairs of pairs
  constexpr uint64_t kPair = (1 << 2 * kBits) - 1, kPairs = kPair * 0x0001000100010001;
  eight = (eight & kPairs) | (eight & kPairs) >> (16 - 2 * kBits);
  constexpr uint64_t kFour = (1 << 4 * kBits) - 1;
  return (eight & kFour) | (eight >> (32 - 4 * kBits) & kFour << 4 * kBits);
}

// Packs the codes of a block of n values; codes after the last value become zero.
using Codes = std::array<uint8_t, kValueBlock>;
template <unsigned kBits>
void pack(Codes& codes, size_t n, std::byte* out) {
  std::memset(codes.data() + n, 0, (kValueBlock - n) % 8);
  const std::byte* const end = out + bytes_of_bits(n * kBits);
  size_t i = 0;
  for (; end - out >= 8; i += 8, out += kBits) {  // the next codes overwrite the bytes after these
    const uint64_t bits = packed<kBits>(codes.data() + i);
    std::memcpy(out, &bits, sizeof bits);
  }
  for (; i < n; i += 8, out += kBits) {
    const uint64_t bits = packed<kBits>(codes.data() + i);
    std::memcpy(out, &bits, std::min<size_t>(kBits, static_cast<size_t>(end - out)));
  }
}

// The inverse of packed(): each of 8 codes in a byte of its own.
template <unsigned kBits>
uint64_t spread(uint64_t eight) {
  constexpr uint64_t kCode = (1 << kBits) - 1, kPair = (1 << 2 * kBits) - 1;
  constexpr uint64_t kFour = (1 << 4 * kBits) - 1;
  eight = (eight & kFour) | (eight & kFour << 4 * kBits) << (32 - 4 * kBits);
  eight = (eight | eight << (16 - 2 * kBits)) & kPair * 0x0001000100010001;
  return (eight | eight << (8 - kBits)) & kCode * 0x0101010101010101;
}

// The inverse of pack().
template <unsigned kBits>
void unpack(const std::byte* in, size_t n, Codes& codes) {
  const std::byte* const end = in + bytes_of_bits(n * kBits);
  for (size_t i = 0; i < n; i += 8, in += kBits) {
    uint64_t eight = 0;
    if (end - in >= 8) [[likely]]
      std::memcpy(&eight, in, sizeof eight);
    else
      std::memcpy(&eight, in, std::min<size_t>(kBits, static_cast<size_t>(end - in)));
    eight = spread<kBits>(eight);
    std::memcpy(codes.data() + i, &eight, sizeof eight);
  }
}

// The bits of a float with this magnitude and the sign in the lowest bit of a code; one NaN.
[[gnu::always_inline]] inline float with_sign(uint32_t magnitude, uint32_t code) {
  const uint32_t bits = magnitude ^ code << 31;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return std::bit_cast<float>(is_nan ? std::bit_cast<uint32_t>(kNaN) : bits);
}

// Values of packed codes of Signs.
template <unsigned kBits>
struct FromSigns {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const std::byte* in, size_t n, uint32_t low, uint32_t high,
                                         float* values) {
    const auto value = [&](uint32_t codes, uint32_t i) __attribute__((always_inline)) {
      const uint32_t code = codes >> i * kBits;
      const uint32_t above = kBits == 1 ? 0 : -(code >> 1 & 1);
      return with_sign(low ^ ((low ^ high) & above), code);
    };
    using Codes = std::conditional_t<kBits == 1, uint16_t, uint32_t>;
    constexpr size_t kAtOnce = sizeof(Codes) * 8 / kBits;
    Codes codes = 0;
    size_t first = 0;
    for (; first + kAtOnce <= n; first += kAtOnce, in += sizeof codes) {
      std::memcpy(&codes, in, sizeof codes);
#pragma GCC ivdep
#pragma GCC unroll 1
      for (uint32_t i = 0; i < kAtOnce; ++i) values[first + i] = value(codes, i);
    }
    std::memcpy(&codes, in, bytes_of_bits((n - first) * kBits));
    for (uint32_t i = 0; first + i < n; ++i) values[first + i] = value(codes, i);
  }
};

template <unsigned kBits>
void pack_signs(std::span<const float> values, float limit, std::byte* out) {
  alignas(64) Codes codes;
  cpu::run_on<Signs>(cpu::isa_here(), values.data(), values.size(), limit, codes.data());
  pack<kBits>(codes, values.size(), out);
}

void write_one_bit(std::span<const float> values, std::byte* out) {
  const Magnitudes magnitudes(values);
  uint16_t level = cpu::narrow_bfloat16(kNaN);
  if (magnitudes.finite)
    level = level_of(split_at(magnitudes, values.size(), kEverything).below /
                     static_cast<double>(values.size()));
  std::memcpy(out, &level, sizeof level);
  pack_signs<1>(values, kEverything, out + sizeof level);
}

// Two levels: the means of the magnitudes on either side of a limit. The limit is first the mean of
// all, then, twice, the midpoint of the levels (S. Lloyd, Least squares quantization in PCM, IEEE
// Trans. Inf. Theory 28(2), 1982). If no magnitude is above the limit, both levels are the mean.
void write_two_bit(std::span<const float> values, std::byte* out) {
  const Magnitudes magnitudes(values);
  const size_t n = values.size();
  std::array<uint16_t, 2> levels;
  levels.fill(cpu::narrow_bfloat16(kNaN));
  float limit = kEverything;
  if (magnitudes.finite) {
    limit = limit_of(split_at(magnitudes, n, kEverything).below / static_cast<double>(n));
    for (int i = 0; i <= kRefinements; ++i) {
      const Split split = split_at(magnitudes, n, limit);
      const double low = split.below / static_cast<double>(n - split.count_above);
      const double high =
          split.count_above == 0 ? low : split.above / static_cast<double>(split.count_above);
      levels = {level_of(low), level_of(high)};
      if (i < kRefinements) limit = limit_of((low + high) / 2);
    }
  }
  std::memcpy(out, levels.data(), sizeof levels);
  pack_signs<2>(values, limit, out + sizeof levels);
}

template <unsigned kBits>
void read_signs(const std::byte* in, std::span<float> values) {
  std::array<uint16_t, 2> levels{};
  std::memcpy(levels.data(), in, kBits * sizeof levels[0]);
  cpu::run_on<FromSigns<kBits>>(cpu::isa_here(), in + kBits * sizeof levels[0], values.size(),
                                uint32_t{levels[0]} << 16, uint32_t{levels[1]} << 16,
                                values.data());
}

// ---- equal steps of the exponent ----------------------------------------------------------------

// The smallest and the largest upper half (as in bfloat16) of the magnitudes.
struct Halves {
  alignas(64) std::array<uint16_t, kValueBlock> value;
  int least, largest;

  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, size_t n, Halves* found) {
    uint16_t least = 0xffff, largest = 0;
    for (size_t i = 0; i < n; ++i) {
      const auto half = static_cast<uint16_t>(cpu::key_of(values[i]) >> 16);
      found->value[i] = half;
      least = std::min(least, half);
      largest = std::max(largest, half);
    }
    found->least = least;
    found->largest = largest;
  }
};

// The header of a block of 3bit or 4bit values.
struct Grid {
  uint16_t low, step;
};

// One byte per value: its sign, and in the next bits its number on a grid of kSteps.
template <int kSteps>
struct ValueNumbers {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, const uint16_t* halves, size_t n,
                                         Grid grid, uint8_t* codes) {
    for (size_t i = 0; i < n; ++i) {
      const int half = halves[i];
      int number = 0;
#pragma GCC unroll 8
      for (int step = 1; step < kSteps; ++step) number += half >= grid.low + step * grid.step;
      const uint32_t sign = std::bit_cast<uint32_t>(values[i]) >> 31;
      codes[i] = static_cast<uint8_t>(sign | static_cast<uint32_t>(number) << 1);
    }
  }
};

// Values of codes of ValueNumbers. `low` is finite.
struct FromNumbers {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const uint8_t* codes, size_t n, Grid grid, float* values) {
    const uint32_t middle = grid.low + grid.step / 2u, step = grid.step;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t code = codes[i];
      const uint32_t half = std::min<uint32_t>(middle + (code >> 1) * step, kLargestLevel);
      values[i] = with_sign(half << 16, code);
    }
  }
};

template <unsigned kBits>
void write_grid(std::span<const float> values, std::byte* out) {
  constexpr int kSteps = 1 << (kBits - 1);
  Halves halves;
  cpu::run_on<Halves>(cpu::isa_here(), values.data(), values.size(), &halves);
  Grid grid{cpu::narrow_bfloat16(kNaN), 0};
  alignas(64) Codes codes;
  if (halves.largest <= kLargestLevel) {
    const int low = std::max(halves.least, halves.largest - kReach);
    grid = {static_cast<uint16_t>(low), static_cast<uint16_t>((halves.largest - low) / kSteps + 1)};
    cpu::run_on<ValueNumbers<kSteps>>(cpu::isa_here(), values.data(), halves.value.data(),
                                      values.size(), grid, codes.data());
  } else {
    cpu::run_on<Signs>(cpu::isa_here(), values.data(), values.size(), kEverything, codes.data());
  }
  std::memcpy(out, &grid, sizeof grid);
  pack<kBits>(codes, values.size(), out + sizeof grid);
}

template <unsigned kBits>
void read_grid(const std::byte* in, std::span<float> values) {
  Grid grid{};
  std::memcpy(&grid, in, sizeof grid);
  if (grid.low > kLargestLevel) return std::fill(values.begin(), values.end(), kNaN);
  alignas(64) Codes codes;
  unpack<kBits>(in + sizeof grid, values.size(), codes);
  cpu::run_on<FromNumbers>(cpu::isa_here(), codes.data(), values.size(), grid, values.data());
}

// ---- equal steps of the value -------------------------------------------------------------------

constexpr float kMostSteps = 127;
constexpr float kMostStep = 0x1.020406p+121F;  // kMostSteps of them are finite

struct LargestKey {
  template <cpu::Isa>
  [[gnu::always_inline]] static uint32_t run(const float* values, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, cpu::key_of(values[i]));
    return largest;
  }
};

struct ToSteps {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, size_t n, float step,
                                         int8_t* numbers) {
    constexpr float kInteger = 12582912;  // 1.5 * 2^23: a sum with it is rounded to an integer
    constexpr int32_t kBits = std::bit_cast<int32_t>(kInteger);
    for (size_t i = 0; i < n; ++i) {
      const float steps = std::max(std::min(values[i] / step, kMostSteps), -kMostSteps);
      numbers[i] = static_cast<int8_t>(std::bit_cast<int32_t>(steps + kInteger) - kBits);
    }
  }
};

struct FromSteps {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const int8_t* numbers, size_t n, float step,
                                         float* values) {
    for (size_t i = 0; i < n; ++i)
      values[i] = cpu::with_one_nan(static_cast<float>(numbers[i]) * step);
  }
};

void write_steps(std::span<const float> values, std::byte* out) {
  const cpu::Isa isa = cpu::isa_here();
  const auto largest =
      std::bit_cast<float>(cpu::run_on<LargestKey>(isa, values.data(), values.size()));
  const float step = cpu::is_finite(largest) ? std::min(largest / kMostSteps, kMostStep) : kNaN;
  std::memcpy(out, &step, sizeof step);
  auto* const numbers = reinterpret_cast<int8_t*>(out + sizeof step);
  if (step > 0)
    cpu::run_on<ToSteps>(isa, values.data(), values.size(), step, numbers);
  else  // also if the step is rounded to 0
    std::memset(numbers, 0, values.size());
}

void read_steps(const std::byte* in, std::span<float> values) {
  float step = 0;
  std::memcpy(&step, in, sizeof step);
  cpu::run_on<FromSteps>(cpu::isa_here(), reinterpret_cast<const int8_t*>(in + sizeof step),
                         values.size(), step, values.data());
}

}  // namespace

void write_levels(unsigned bits, std::span<const float> values, std::byte* out) {
  if (bits == 1) return write_one_bit(values, out);
  if (bits == 2) return write_two_bit(values, out);
  if (bits == 3) return write_grid<3>(values, out);
  if (bits == 4) return write_grid<4>(values, out);
  write_steps(values, out);
}

void read_levels(unsigned bits, const std::byte* in, std::span<float> values) {
  if (bits == 1) return read_signs<1>(in, values);
  if (bits == 2) return read_signs<2>(in, values);
  if (bits == 3) return read_grid<3>(in, values);
  if (bits == 4) return read_grid<4>(in, values);
  read_steps(in, values);
}

bool has_finite_levels(unsigned bits, const std::byte* in) {
  uint32_t words = 0;
  std::memcpy(&words, in, level_bytes(bits));
  if (bits == 8) return cpu::is_finite(std::bit_cast<float>(words));
  const auto is_level = [](uint32_t half) { return (half & 0x7fff) <= kLargestLevel; };
  return is_level(words) && (bits != 2 || is_level(words >> 16));
}

void write_values(ValueCode code, std::span<const float> values, std::byte* out) {
  switch (code) {
    case ValueCode::float32:
      std::memcpy(out, values.data(), values.size_bytes());
      return;
    case ValueCode::bfloat16:
      for (size_t i = 0; i < values.size(); ++i) cpu::store<Dtype::bfloat16>(out, i, values[i]);
      return;
    case ValueCode::two_bit:
      return write_levels(2, values, out);
    case ValueCode::one_bit:
      return write_levels(1, values, out);
    case ValueCode::three_bit:
      return write_levels(3, values, out);
  }
}

void read_values(ValueCode code, const std::byte* in, std::span<float> values) {
  switch (code) {
    case ValueCode::float32:
      std::memcpy(values.data(), in, values.size_bytes());
      return;
    case ValueCode::bfloat16:
      for (size_t i = 0; i < values.size(); ++i) values[i] = cpu::load<Dtype::bfloat16>(in, i);
      return;
    case ValueCode::two_bit:
      return read_levels(2, in, values);
    case ValueCode::one_bit:
      return read_levels(1, in, values);
    case ValueCode::three_bit:
      return read_levels(3, in, values);
  }
}

bool values_end_in_zeros(ValueCode code, std::span<const std::byte> bytes, size_t count) {
  const size_t used = count * packed_bits(code) % 8;
  return used == 0 || std::to_integer<unsigned>(bytes.back()) >> used == 0;
}

}  // namespace pycomm::codec
