// What the launches that write or read a packet share.
#pragma once

#include <algorithm>
#include <span>

#include "cuda/compact_bits.cuh"
#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

// A block of gaps: its parameter, and the number of bits of its quotients.
struct GapBits {
  unsigned parameter, quotients;
};
// The bits of a run; later: of all earlier runs.
struct RunBits {
  unsigned steps;  // bits of the parameters
  unsigned quotients;
  unsigned remainders;
  bool bad;  // the indices do not ascend within the array
};
struct Choice {
  RunBits all;
  unsigned code;  // or kNoIndices
  uint64_t value_bytes;
};
inline constexpr unsigned kNoIndices = 3;  // all groups are in the packet

// A packet to write. `code` 3: choose the smallest.
inline constexpr unsigned kCompactHead = 15;
struct Writing {
  const int32_t* indices;
  void* values;  // read, or taken from tensors first
  void* errors;
  uint8_t* out;
  uint64_t* bytes;
  GapBits* blocks;  // [block_count]
  RunBits* runs;    // [run_count]
  unsigned* ones;   // [word_count] bits of the quotients
  Choice* choice;
  unsigned k, count, value_count;
  unsigned first;  // the packet has the indices less this
  unsigned block_count, run_count, word_count;
  unsigned code, value_code;
  unsigned start;  // the predecessor of the first parameter
  unsigned head_bytes;
  uint8_t head[kCompactHead];  // of index code 0
};

// A block of gaps.
struct BlockPlace {
  unsigned parameter;
  unsigned remainders;  // of the blocks before it, in units of 8 bytes
  unsigned sum;         // of the increments of its indices
};
struct Verdict {
  unsigned bad;       // set by single-block launches and the first launch
  unsigned unsorted;  // set by any thread
  unsigned index_code, value_code;
  uint64_t index_at, index_bytes;
  uint64_t quotient_bytes;
};

// The bytes of the values by code, and the limits of those of the indices by code.
struct PacketLimits {
  uint64_t value_bytes[kValueCodeCount], least[3], most[3];
};

// A packet to read. The limits of a valid packet with these numbers are known beforehand.
struct Reading {
  const uint8_t* bytes;
  uint64_t size;
  int32_t* indices;   // [k], of groups
  int32_t* elements;  // [k << bits], of these groups; null: groups are elements
  float* values;      // [k << bits]
  unsigned* refused;
  Verdict* verdict;
  unsigned* ones;      // [block_count + k] position of each one
  unsigned* chunks;    // [chunk_count] ones in each; later: before each
  BlockPlace* blocks;  // [block_count]
  uint64_t* runs;      // [run_count] index increments in each; later: before each
  PacketLimits limits;
  unsigned k, count;
  unsigned first;  // added to the indices
  unsigned bits;   // a group has 2^bits elements
  unsigned block_count, run_count, chunk_count;
  unsigned start;
  unsigned head_bytes;
  uint8_t head[kCompactHead];  // without the codes
};
__host__ __device__ inline unsigned values_of(const Reading& r) { return r.k << r.bits; }

// The packets of a launch, by row: an argument, so that no table is copied to the device first.
template <class Row, unsigned kRows>
struct LaunchRows {
  static constexpr unsigned kMost = kRows;
  Row of[kRows];
};
using FewWritings = LaunchRows<Writing, 8>;
using ManyWritings = LaunchRows<Writing, 128>;
static_assert(sizeof(ManyWritings) <= 32000);

template <class Packets, class Row>
Packets packets_of(std::span<const Row> rows) {
  Packets packets{};
  std::ranges::copy(rows, packets.of);
  return packets;
}

}  // namespace pycomm::cuda
