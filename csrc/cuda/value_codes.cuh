// The codes of values with few bits: a thread block encodes 4096 values that share levels, and one
// thread decodes a value. Sums are computed as on the CPU: in float64, in 128 lanes that are then
// added in pairs.
#pragma once

#include "cuda/compact_bits.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kValueThreads = 128;        // lanes of a sum
inline constexpr unsigned kNaNLevel = 0x7fc0;         // bfloat16
inline constexpr unsigned kMostLevel = 0x7f7f;        // the largest finite bfloat16
inline constexpr unsigned kGridReach = 8 * 128;       // range of the levels of 3bit and 4bit values
inline constexpr float kMostSteps = 127;              // of 8bit values
inline constexpr float kMostStep = 0x1.020406p+121F;  // kMostSteps of them are finite

// As in codec/compact.h; the last two only in quantized arrays (kernels/quantize.h).
enum : unsigned { kFloat32, kBfloat16, kTwoBit, kOneBit, kThreeBit, kValueCodeCount };
inline constexpr unsigned kFourBit = kValueCodeCount, kEightBit = kValueCodeCount + 1;

// For a whole block.
__device__ __forceinline__ unsigned levelled_bytes(unsigned code) {
  switch (code) {
    case kFloat32:
      return 4 * kLevelled;
    case kBfloat16:
      return 2 * kLevelled;
    case kTwoBit:
      return 4 + kLevelled / 4;
    case kOneBit:
      return 2 + kLevelled / 8;
    case kThreeBit:
      return 4 + 3 * kLevelled / 8;
  }
  return 0;
}

// For `count` values; only the last block may be shorter.
__device__ __forceinline__ uint64_t coded_bytes(unsigned code, unsigned count) {
  const unsigned rest = count % kLevelled;
  const uint64_t whole = uint64_t{count / kLevelled} * levelled_bytes(code);
  if (rest == 0) return whole;
  switch (code) {
    case kFloat32:
      return whole + 4 * rest;
    case kBfloat16:
      return whole + 2 * rest;
    case kTwoBit:
      return whole + 4 + bytes_for(2 * rest);
    case kOneBit:
      return whole + 2 + bytes_for(rest);
    case kThreeBit:
      return whole + 4 + bytes_for(3 * rest);
  }
  return whole;
}

// The bfloat16 bits of a magnitude, by its number on the grid.
__device__ __forceinline__ unsigned grid_level(unsigned low, unsigned step, unsigned number) {
  return low > kMostLevel ? kNaNLevel : min(low + number * step + step / 2, kMostLevel);
}

__device__ __forceinline__ float from_level(unsigned level) {
  return canonical(__uint_as_float(level << 16));
}

// Decodes the i-th value of a block.
__device__ __forceinline__ float read_value(unsigned code, const uint8_t* from, unsigned i) {
  switch (code) {
    case kFloat32:
      return __uint_as_float(load_bytes(from + 4 * i, 4));
    case kBfloat16:
      return __uint_as_float(load_bytes(from + 2 * i, 2) << 16);
    case kTwoBit: {
      const unsigned bits = from[4 + i / 4] >> 2 * (i % 4);
      const float level = from_level(load_bytes(from + (bits & 2), 2));
      return (bits & 1) != 0 ? canonical(-level) : level;
    }
    case kOneBit: {
      const float level = from_level(load_bytes(from, 2));
      return (from[2 + i / 8] >> i % 8 & 1) != 0 ? canonical(-level) : level;
    }
    case kThreeBit: {
      const unsigned bits = load_bits(from + 4, uint64_t{3} * i, 3);
      const unsigned low = load_bytes(from, 2), step = load_bytes(from + 2, 2);
      const float level = from_level(grid_level(low, step, bits >> 1));
      return (bits & 1) != 0 ? canonical(-level) : level;
    }
    case kFourBit: {
      const unsigned bits = from[4 + i / 2] >> 4 * (i % 2) & 15;
      const unsigned low = load_bytes(from, 2), step = load_bytes(from + 2, 2);
      const float level = from_level(grid_level(low, step, bits >> 1));
      return (bits & 1) != 0 ? canonical(-level) : level;
    }
    case kEightBit: {
      const float step = __uint_as_float(load_bytes(from, 4));
      return canonical(multiply(static_cast<float>(static_cast<int8_t>(from[4 + i])), step));
    }
  }
  return 0;
}

struct ValueSpace {
  float value[kLevelled];
};
struct LaneSpace {
  double below[kValueThreads], above[kValueThreads];
  unsigned count[kValueThreads];
};

__device__ __forceinline__ float magnitude_at(unsigned i) {
  return from_magnitude<float>(magnitude(gpu::shared<ValueSpace>().value[i]));
}

// Sums of the magnitudes up to a limit and above it, and the number above.
struct Split {
  double below, above;
  unsigned count;
};
__device__ __forceinline__ Split split_at(unsigned n, float limit) {
  auto& lanes = gpu::shared<LaneSpace>();
  const unsigned lane = threadIdx.x;
  Split mine{0, 0, 0};
  for (unsigned i = lane; i < n; i += kValueThreads) {
    const float x = magnitude_at(i);
    const bool high = x > limit;
    mine.below = add(mine.below, high ? 0.0 : static_cast<double>(x));
    mine.above = add(mine.above, high ? static_cast<double>(x) : 0.0);
    mine.count += high;
  }
  lanes.below[lane] = mine.below;
  lanes.above[lane] = mine.above;
  lanes.count[lane] = mine.count;
  __syncthreads();
  for (unsigned half = kValueThreads / 2; half > 0; half /= 2) {
    if (lane < half) {
      lanes.below[lane] = add(lanes.below[lane], lanes.below[lane + half]);
      lanes.above[lane] = add(lanes.above[lane], lanes.above[lane + half]);
      lanes.count[lane] += lanes.count[lane + half];
    }
    __syncthreads();
  }
  const Split all{lanes.below[0], lanes.above[0], lanes.count[0]};
  __syncthreads();
  return all;
}

// The largest float32 up to a limit; it separates the same float32 values.
__device__ __forceinline__ float limit_of(double limit) {
  const float near = static_cast<float>(limit);
  return static_cast<double>(near) > limit ? __uint_as_float(bits_as<uint32_t>(near) - 1) : near;
}

__device__ __forceinline__ unsigned level_of(double mean) {
  return min(unsigned{bits_as<uint16_t>(narrow<Bfloat16>(static_cast<float>(mean)))}, kMostLevel);
}

// The two levels of a block: the means of the magnitudes on either side of a limit; those above it
// get the higher level. The limit is first the mean of all, then, twice, the midpoint of the
// levels.
struct Levels {
  unsigned low, high;
  float limit;
};
__device__ __forceinline__ Levels find_levels(unsigned code, unsigned n) {
  const float everything = __uint_as_float(0x7f800000u);
  bool finite = true;
  for (unsigned i = threadIdx.x; i < n; i += kValueThreads) finite &= magnitude_at(i) < everything;
  if (__syncthreads_or(!finite)) return {kNaNLevel, kNaNLevel, everything};
  const double mean = divide(split_at(n, everything).below, static_cast<double>(n));
  if (code == kOneBit) return {level_of(mean), 0, everything};
  Levels levels{0, 0, limit_of(mean)};
  for (unsigned refined = 0;; ++refined) {
    const Split split = split_at(n, levels.limit);
    const double low = divide(split.below, static_cast<double>(n - split.count));
    const double high =
        split.count == 0 ? low : divide(split.above, static_cast<double>(split.count));
    levels.low = level_of(low);
    levels.high = level_of(high);
    if (refined == 2) return levels;
    levels.limit = limit_of(divide(add(low, high), 2.0));
  }
}

// Packs a sign and, with two bits, the level: a byte at a time.
__device__ __forceinline__ void write_levelled(unsigned code, unsigned n, uint8_t* to) {
  const Levels levels = find_levels(code, n);
  const unsigned width = code == kTwoBit ? 2 : 1, each = 8 / width;
  if (threadIdx.x == 0) store_bytes(to, levels.low | levels.high << 16, code == kTwoBit ? 4 : 2);
  for (unsigned byte = threadIdx.x; byte * each < n; byte += kValueThreads) {
    unsigned bits = 0;
    for (unsigned j = 0; j < each && byte * each + j < n; ++j) {
      const unsigned i = byte * each + j;
      const unsigned sign = bits_as<uint32_t>(gpu::shared<ValueSpace>().value[i]) >> 31;
      const unsigned high = width == 2 && magnitude_at(i) > levels.limit ? 2 : 0;
      bits |= (sign | high) << width * j;
    }
    to[2 * width + byte] = static_cast<uint8_t>(bits);
  }
}

// The smallest and the largest upper half of the magnitudes of a block.
struct ValueRange {
  unsigned least, largest;
};
struct RangeSpace {
  ValueRange by_warp[kValueThreads / 32];
};
__device__ __forceinline__ ValueRange find_range(unsigned n) {
  auto& by_warp = gpu::shared<RangeSpace>().by_warp;
  ValueRange range{0xffff, 0};
  for (unsigned i = threadIdx.x; i < n; i += kValueThreads) {
    const unsigned half = magnitude(gpu::shared<ValueSpace>().value[i]) >> 16;
    range.least = min(range.least, half);
    range.largest = max(range.largest, half);
  }
  for (int by = 16; by > 0; by /= 2) {
    range.least = min(range.least, __shfl_xor_sync(gpu::kFullWarp, range.least, by));
    range.largest = max(range.largest, __shfl_xor_sync(gpu::kFullWarp, range.largest, by));
  }
  if (gpu::lane_id() == 0) by_warp[threadIdx.x / 32] = range;
  __syncthreads();
  for (const ValueRange& other : by_warp) {
    range.least = min(range.least, other.least);
    range.largest = max(range.largest, other.largest);
  }
  return range;
}

// Packs a sign and a number on a grid: eight values at a time, which take kBits bytes.
template <unsigned kBits>
__device__ __forceinline__ void write_gridded(unsigned n, uint8_t* to) {
  const ValueRange range = find_range(n);
  unsigned low = kNaNLevel, step = 0;
  if (range.largest <= kMostLevel) {
    low = range.largest - min(range.largest - range.least, kGridReach);
    step = (range.largest - low) / (1u << (kBits - 1)) + 1;
  }
  if (threadIdx.x == 0) store_bytes(to, low | step << 16, 4);
  for (unsigned first = 8 * threadIdx.x; first < n; first += 8 * kValueThreads) {
    const unsigned some = min(8u, n - first);
    unsigned bits = 0;
    for (unsigned j = 0; j < some; ++j) {
      const unsigned own = bits_as<uint32_t>(gpu::shared<ValueSpace>().value[first + j]);
      const unsigned half = (own & 0x7fffffffu) >> 16;
      const unsigned number = step == 0 || half < low ? 0 : (half - low) / step;
      bits |= (own >> 31 | number << 1) << kBits * j;
    }
    store_bytes(to + 4 + first / 8 * kBits, bits, (kBits * some + 7) / 8);
  }
}

struct LargestSpace {
  unsigned by_warp[kValueThreads / 32];
};

// Equal steps up to the largest magnitude, one byte for each value.
__device__ __forceinline__ void write_steps(unsigned n, uint8_t* to) {
  auto& by_warp = gpu::shared<LargestSpace>().by_warp;
  unsigned largest = 0;
  for (unsigned i = threadIdx.x; i < n; i += kValueThreads)
    largest = max(largest, magnitude(gpu::shared<ValueSpace>().value[i]));
  for (int by = 16; by > 0; by /= 2)
    largest = max(largest, __shfl_xor_sync(gpu::kFullWarp, largest, by));
  if (gpu::lane_id() == 0) by_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (const unsigned other : by_warp) largest = max(largest, other);
  const float step = largest < 0x7f800000u
                         ? fminf(divide(__uint_as_float(largest), kMostSteps), kMostStep)
                         : __uint_as_float(0x7fc00000u);
  if (threadIdx.x == 0) store_bytes(to, bits_as<uint32_t>(step), 4);
  constexpr float kInteger = 12582912;  // 1.5 * 2^23: a sum with it is rounded to an integer
  for (unsigned i = threadIdx.x; i < n; i += kValueThreads) {
    unsigned number = 0;
    if (step > 0) {
      const float steps = divide(gpu::shared<ValueSpace>().value[i], step);
      const float within = fmaxf(fminf(steps, kMostSteps), -kMostSteps);
      number = bits_as<uint32_t>(add(within, kInteger)) - bits_as<uint32_t>(kInteger);
    }
    to[4 + i] = static_cast<uint8_t>(number);
  }
}

// Whether all values of an encoded block with levels were finite.
__device__ __forceinline__ bool has_finite_levels(unsigned code, const uint8_t* from) {
  const unsigned words = load_bytes(from, code == kOneBit ? 2 : 4);
  if (code == kEightBit) return (words & 0x7fffffffu) < 0x7f800000u;
  return (words & 0x7fffu) <= kMostLevel &&
         (code != kTwoBit || (words >> 16 & 0x7fffu) <= kMostLevel);
}

// Encodes the values of a block in shared memory. The caller must call __syncthreads before it
// reads the bytes.
__device__ __forceinline__ void write_levels(unsigned code, unsigned n, uint8_t* to) {
  if (code == kThreeBit) return write_gridded<3>(n, to);
  if (code == kFourBit) return write_gridded<4>(n, to);
  if (code == kEightBit) return write_steps(n, to);
  if (code == kTwoBit || code == kOneBit) return write_levelled(code, n, to);
  for (unsigned i = threadIdx.x; i < n; i += kValueThreads) {
    const float value = gpu::shared<ValueSpace>().value[i];
    if (code == kFloat32)
      store_bytes(to + 4 * i, bits_as<uint32_t>(value), 4);
    else
      store_bytes(to + 2 * i, bits_as<uint16_t>(narrow<Bfloat16>(value)), 2);
  }
}

}  // namespace pycomm::cuda
