// Shared by the encoder and the decoder of compact packets: bits in unaligned bytes, and sums that
// one block computes over all rows of a table.
//
// codec/compact.h has the format. Bit positions are unsigned: the quotients of k gaps take at most
// k + count bits, their parameters 61 per 64 gaps, so both together less than 2^32.
#pragma once

#include "cuda/block.cuh"
#include "cuda/numbers.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kCompactThreads = 256;
inline constexpr unsigned kCompactWarps = kCompactThreads / 32;
inline constexpr unsigned kGaps = 64;            // in a block of the Rice code: two per lane
inline constexpr unsigned kRunBlocks = 32;       // in a run: one per lane
inline constexpr unsigned kTableThreads = 1024;  // of the one block that sums a table
inline constexpr unsigned kMostWidth = 30;       // of a remainder
inline constexpr unsigned kLevelled = 4096;      // values that share levels

__host__ __device__ constexpr uint64_t bytes_for(uint64_t bits) { return (bits + 7) / 8; }

// Stores the lowest `bytes` of a number.
__device__ __forceinline__ void store_bytes(uint8_t* to, unsigned number, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(number >> 8 * i);
}
__device__ __forceinline__ unsigned load_bytes(const uint8_t* from, unsigned bytes) {
  unsigned number = 0;
  for (unsigned i = 0; i < bytes; ++i) number |= static_cast<unsigned>(from[i]) << 8 * i;
  return number;
}

// Loads `width` bits, at most kMostWidth. It reads no byte without any of these bits.
__device__ __forceinline__ unsigned load_bits(const uint8_t* from, uint64_t at, unsigned width) {
  if (width == 0) return 0;
  uint64_t number = 0;
  const uint64_t first = at / 8, last = (at + width - 1) / 8;
  for (uint64_t i = first; i <= last; ++i)
    number |= static_cast<uint64_t>(from[i]) << 8 * (i - first);
  return static_cast<unsigned>(number >> at % 8) & ((1u << width) - 1);
}

// Gaps of a block: 64, except in the last one.
__device__ __forceinline__ unsigned gaps_of(unsigned block, unsigned k) {
  return min(kGaps, k - block * kGaps);
}

// The rows of a table for a thread of the single block: in order, about equal numbers.
struct Stretch {
  unsigned begin, end;
};
__device__ __forceinline__ Stretch stretch_of(unsigned rows) {
  const unsigned each = (rows + kTableThreads - 1) / kTableThreads;
  const unsigned begin = min(rows, threadIdx.x * each);
  return {begin, min(rows, begin + each)};
}

// The sum of the rows before this thread's rows; `total`, in the last thread, the sum of all. The
// caller must call __syncthreads before the next call.
template <class T, class Row>
__device__ __forceinline__ T sum_before(Stretch mine, T& total, Row row) {
  T sum = 0;
  for (unsigned i = mine.begin; i < mine.end; ++i) sum += row(i);
  total = scan_block<kTableThreads>(sum);
  return total - sum;
}

}  // namespace pycomm::cuda
