// What the launches that write a packet share.
#pragma once

#include "cuda/compact_bits.cuh"

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
  unsigned head_bytes;
  uint64_t value_bytes;
};
inline constexpr unsigned kNoIndices = 3;  // all groups are selected

// Arguments of every launch. `code` 3: choose the smallest.
inline constexpr unsigned kCompactHead = 14;
struct Writing {
  const int32_t* indices;
  const void* values;
  void* residual;
  uint8_t* out;
  uint64_t* bytes;
  GapBits* blocks;  // [block_count]
  RunBits* runs;    // [run_count]
  unsigned* ones;   // [word_count] bits of the quotients
  Choice* choice;
  const unsigned* value_count;  // of a packet of groups, on the device; null: k
  unsigned k, count;
  unsigned block_count, run_count, word_count;
  unsigned code, value_code;
  unsigned start;  // the predecessor of the first parameter
  unsigned head_bytes;
  uint8_t head[kCompactHead];  // of index code 0, up to the number of values
};

}  // namespace pycomm::cuda
