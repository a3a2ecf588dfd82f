// The value codes. The order of arithmetic is that of compact.h and the reference: sums over a
// block use float64, in 128 lanes that are then added in pairs.
#include "codec/cpu/value_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

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
  const std::byte* const end = out + (n * kBits + 7) / 8;
  for (size_t i = 0; i < n; i += 8, out += kBits) {
    const uint64_t bits = packed<kBits>(codes.data() + i);
    std::memcpy(out, &bits, std::min<size_t>(kBits, static_cast<size_t>(end - out)));
  }
}

template <unsigned kBits>
void pack_signs(std::span<const float> values, float limit, std::byte* out) {
  alignas(64) Codes codes;
  cpu::run_on<Signs>(cpu::isa_here(), values.data(), values.size(), limit, codes.data());
  pack<kBits>(codes, values.size(), out);
}

// values[i] = one of the 2^kBits values of the block. No code crosses a byte boundary.
template <unsigned kBits>
void unpack(const std::byte* in, std::array<float, 1 << kBits> meanings, std::span<float> values) {
  constexpr size_t kEach = 8 / kBits, kMask = (1 << kBits) - 1;
  const auto value = [&](size_t i, size_t j) {
    return meanings[std::to_integer<size_t>(in[i / kEach]) >> kBits * j & kMask];
  };
  const size_t whole = values.size() / kEach * kEach;
  for (size_t i = 0; i < whole; i += kEach)
    for (size_t j = 0; j < kEach; ++j) values[i + j] = value(i, j);
  for (size_t i = whole; i < values.size(); ++i) values[i] = value(i, i - whole);
}

float negative(float level) { return cpu::with_one_nan(-level); }

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

void read_one_bit(const std::byte* in, std::span<float> values) {
  const float level = cpu::load<Dtype::bfloat16>(in, 0);
  unpack<1>(in + 2, {cpu::with_one_nan(level), negative(level)}, values);
}

void read_two_bit(const std::byte* in, std::span<float> values) {
  const float low = cpu::load<Dtype::bfloat16>(in, 0), high = cpu::load<Dtype::bfloat16>(in, 1);
  unpack<2>(in + 4,
            {cpu::with_one_nan(low), negative(low), cpu::with_one_nan(high), negative(high)},
            values);
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

// The header of a block of 3bit values.
struct Grid {
  uint16_t low, step;

  uint16_t at(unsigned number) const {
    if (low > kLargestLevel) return cpu::narrow_bfloat16(kNaN);
    const unsigned bits = low + number * step + step / 2u;
    return static_cast<uint16_t>(std::min<unsigned>(bits, kLargestLevel));
  }
};

// One byte per value: its sign, and in the next two bits its number on the grid.
struct ValueNumbers {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* values, const uint16_t* halves, size_t n,
                                         Grid grid, uint8_t* codes) {
    const int first = grid.low + grid.step, second = first + grid.step;
    const int third = second + grid.step;
    for (size_t i = 0; i < n; ++i) {
      const int half = halves[i];
      const int number = (half >= first) + (half >= second) + (half >= third);
      const uint32_t sign = std::bit_cast<uint32_t>(values[i]) >> 31;
      codes[i] = static_cast<uint8_t>(sign | static_cast<uint32_t>(number) << 1);
    }
  }
};

void write_three_bit(std::span<const float> values, std::byte* out) {
  Halves halves;
  cpu::run_on<Halves>(cpu::isa_here(), values.data(), values.size(), &halves);
  Grid grid{cpu::narrow_bfloat16(kNaN), 0};
  alignas(64) Codes codes;
  if (halves.largest <= kLargestLevel) {
    const int low = std::max(halves.least, halves.largest - kReach);
    grid = {static_cast<uint16_t>(low), static_cast<uint16_t>((halves.largest - low) / 4 + 1)};
    cpu::run_on<ValueNumbers>(cpu::isa_here(), values.data(), halves.value.data(), values.size(),
                              grid, codes.data());
  } else {
    cpu::run_on<Signs>(cpu::isa_here(), values.data(), values.size(), kEverything, codes.data());
  }
  std::memcpy(out, &grid, sizeof grid);
  pack<3>(codes, values.size(), out + sizeof grid);
}

void read_three_bit(const std::byte* in, std::span<float> values) {
  Grid grid{};
  std::memcpy(&grid, in, sizeof grid);
  in += sizeof grid;
  std::array<float, 8> meanings;
  for (unsigned number = 0; number < 4; ++number) {
    const float level = cpu::widen_bfloat16(grid.at(number));
    meanings[2 * number] = cpu::with_one_nan(level);
    meanings[2 * number + 1] = negative(level);
  }
  const std::byte* const end = in + (3 * values.size() + 7) / 8;
  for (size_t i = 0; i < values.size(); i += 8, in += 3) {
    uint32_t bits = 0;
    std::memcpy(&bits, in, std::min<size_t>(3, static_cast<size_t>(end - in)));
    const size_t some = std::min<size_t>(8, values.size() - i);
    for (size_t j = 0; j < some; ++j) values[i + j] = meanings[bits >> 3 * j & 7];
  }
}

}  // namespace

void write_values(ValueCode code, std::span<const float> values, std::byte* out) {
  switch (code) {
    case ValueCode::float32:
      std::memcpy(out, values.data(), values.size_bytes());
      return;
    case ValueCode::bfloat16:
      for (size_t i = 0; i < values.size(); ++i) cpu::store<Dtype::bfloat16>(out, i, values[i]);
      return;
    case ValueCode::two_bit:
      return write_two_bit(values, out);
    case ValueCode::one_bit:
      return write_one_bit(values, out);
    case ValueCode::three_bit:
      return write_three_bit(values, out);
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
      return read_two_bit(in, values);
    case ValueCode::one_bit:
      return read_one_bit(in, values);
    case ValueCode::three_bit:
      return read_three_bit(in, values);
  }
}

bool values_end_in_zeros(ValueCode code, std::span<const std::byte> bytes, size_t count) {
  const size_t used = count * packed_bits(code) % 8;
  return used == 0 || std::to_integer<unsigned>(bytes.back()) >> used == 0;
}

}  // namespace pycomm::codec
