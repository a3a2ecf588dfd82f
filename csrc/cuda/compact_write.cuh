// Encodes the indices of packets, with the smallest code of each. Each launch has a row of blocks
// for each packet. Its length is that of the packet that needs most, so blocks of others may be
// superfluous.
//
//   measure          one warp per block of gaps: its parameter and its number of bits; a thread
//                    block sums them for a run of 32
//   choose_code      one block: the bit offset of each run; the code, the header, the length
//   encode_indices   one warp per block: remainders, in place; quotients, as ones in an array of
//                    whole words, because a byte has bits of several blocks
//   copy_quotients   copies that array to its unaligned position after the values
//
// compact_values.cuh encodes the values. If the indices do not ascend, `choose_code` records it,
// and later launches write nothing.
#pragma once

#include "cuda/compact_tables.cuh"
#include "cuda/search.cuh"
#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

// The gaps 2 * lane and 2 * lane + 1 of a block; 0 after its end.
struct GapPair {
  unsigned gap[2];
  bool bad;
};

__device__ __forceinline__ int32_t index_of(const Writing& w, unsigned i) {
  return static_cast<int32_t>(static_cast<unsigned>(w.indices[i]) - w.first);
}

__device__ __forceinline__ GapPair load_gaps(const Writing& w, unsigned block) {
  GapPair pair{{0, 0}, false};
  const unsigned first = block * kGaps + 2 * gpu::lane_id();
#pragma unroll
  for (unsigned e = 0; e < 2; ++e) {
    const unsigned i = first + e;
    if (i >= w.k) continue;
    const int32_t index = index_of(w, i), before = i == 0 ? -1 : index_of(w, i - 1);
    pair.gap[e] = static_cast<unsigned>(index) - static_cast<unsigned>(before) - 1;
    pair.bad |= index <= before || static_cast<unsigned>(index) >= w.count;
  }
  return pair;
}

// The sum over the block of (gap / 2^b + 1) / 2, exact up to 2^20.
__device__ __forceinline__ unsigned halves(const GapPair& pair, unsigned b) {
  unsigned sum = 0;
#pragma unroll
  for (const unsigned gap : pair.gap) sum += min(((gap >> b) + 1) >> 1, 1u << 20);
  return sum_lanes(sum);
}

// The smallest b for which the sum is at most n.
__device__ __forceinline__ unsigned find_parameter(const GapPair& pair, unsigned n) {
  unsigned low = 0, high = kMostWidth;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if (halves(pair, middle) <= n)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// The unary number that encodes the difference between two parameters.
__device__ __forceinline__ unsigned zigzag(unsigned from, unsigned to) {
  return to > from ? 2 * (to - from) - 1 : 2 * (from - to);
}

struct MeasureSpace {
  GapBits block[kRunBlocks + 1];  // of a run, after the block before it
};

template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    measure(const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  auto& found = gpu::shared<MeasureSpace>().block;
  const unsigned lane = gpu::lane_id(), run = blockIdx.x, first = run * kRunBlocks;
  for (unsigned i = run * kCompactThreads + threadIdx.x; i < w.word_count;
       i += gridDim.x * kCompactThreads)
    w.ones[i] = 0;
  if (run >= w.run_count) return;
  bool bad = false;
  for (unsigned j = threadIdx.x / 32; j <= kRunBlocks; j += kCompactWarps) {
    GapBits bits{w.start, 0};
    if (first + j > 0 && first + j <= w.block_count) {
      const unsigned block = first + j - 1;
      const GapPair pair = load_gaps(w, block);
      bits.parameter = find_parameter(pair, gaps_of(block, w.k));
      const unsigned quotients = (pair.gap[0] >> bits.parameter) + (pair.gap[1] >> bits.parameter);
      bits.quotients = sum_lanes(quotients) + gaps_of(block, w.k);
      if (lane == 0 && j > 0) w.blocks[block] = bits;
      bad |= pair.bad;
    }
    if (lane == 0) found[j] = bits;
  }
  const bool any_bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x >= 32) return;
  const bool there = first + lane < w.block_count;
  const GapBits mine = found[lane + 1];
  RunBits sum{0, 0, 0, any_bad};
  sum.steps = sum_lanes(there ? zigzag(found[lane].parameter, mine.parameter) + 1 : 0u);
  sum.quotients = sum_lanes(there ? mine.quotients : 0u);
  sum.remainders = sum_lanes(there ? gaps_of(first + lane, w.k) * mine.parameter : 0u);
  if (lane == 0) w.runs[run] = sum;
}

// Writes the code, the header and the length. Called by one thread.
__device__ __forceinline__ void write_head(const Writing& w, const RunBits& all) {
  const bool none = w.k == w.count;
  const uint64_t quotients = uint64_t{all.steps} + all.quotients;
  const uint64_t bytes[3] = {uint64_t{4} * w.k, bytes_for(w.count),
                             bytes_for(quotients) + bytes_for(all.remainders)};
  unsigned code = none ? 0 : w.code;
  if (code == 3) {
    code = 0;
    for (unsigned other = 1; other < 3; ++other)
      if (bytes[other] < bytes[code]) code = other;
  }
  for (unsigned i = 0; i < w.head_bytes && !all.bad; ++i)
    w.out[i] = static_cast<uint8_t>(w.head[i] | (i == 3 ? code : 0));
  const uint64_t value_bytes = coded_bytes(w.value_code, w.value_count);
  *w.choice = {all, none ? kNoIndices : code, value_bytes};
  *w.bytes = all.bad ? 0 : w.head_bytes + value_bytes + (none ? 0 : bytes[code]);
}

template <class Packets>
__global__ void __launch_bounds__(kTableThreads)
    choose_code(const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  const Stretch mine = stretch_of(w.run_count);
  RunBits all{0, 0, 0, false}, before{0, 0, 0, false};
  before.steps = sum_before(mine, all.steps, [&](unsigned i) { return w.runs[i].steps; });
  __syncthreads();
  before.quotients =
      sum_before(mine, all.quotients, [&](unsigned i) { return w.runs[i].quotients; });
  __syncthreads();
  before.remainders =
      sum_before(mine, all.remainders, [&](unsigned i) { return w.runs[i].remainders; });
  bool bad = false;
  for (unsigned i = mine.begin; i < mine.end; ++i) {
    const RunBits here = w.runs[i];
    w.runs[i] = before;
    before.steps += here.steps;
    before.quotients += here.quotients;
    before.remainders += here.remainders;
    bad |= here.bad;
  }
  all.bad = __syncthreads_or(bad) != 0;
  if (threadIdx.x == kTableThreads - 1) write_head(w, all);
}

struct RemainderSpace {
  unsigned number[kCompactWarps][kGaps];
};

// Writes the remainders of a block, `width` bits each. Called by a warp.
__device__ __forceinline__ void write_remainders(const GapPair& pair, unsigned n, unsigned width,
                                                 uint8_t* to) {
  auto& numbers = gpu::shared<RemainderSpace>().number[threadIdx.x / 32];
  const unsigned lane = gpu::lane_id(), mask = (1u << width) - 1;
  __syncwarp();
  numbers[2 * lane] = pair.gap[0] & mask;
  numbers[2 * lane + 1] = pair.gap[1] & mask;
  __syncwarp();
  const unsigned bytes = static_cast<unsigned>(bytes_for(n * width));
  for (unsigned at = 4 * lane; at < bytes; at += 128) {
    const unsigned begin = 8 * at, end = begin + 32;
    unsigned word = 0;
    for (unsigned i = begin / width; i < n && i * width < end; ++i)
      word |=
          i * width < begin ? numbers[i] >> (begin - i * width) : numbers[i] << (i * width - begin);
    store_bytes(to + at, word, min(4u, bytes - at));
  }
}

__device__ __forceinline__ void put_one(unsigned* ones, unsigned at) {
  atomicOr(&ones[at / 32], 1u << at % 32);
}

// The first byte of the indices.
__device__ __forceinline__ uint8_t* places_of(const Writing& w, const Choice& choice) {
  return w.out + w.head_bytes + choice.value_bytes;
}

// Called by a warp.
__device__ __forceinline__ void write_block(const Writing& w, const Choice& choice,
                                            unsigned block) {
  const RunBits& all = choice.all;
  const unsigned lane = gpu::lane_id(), run = block / kRunBlocks;
  const unsigned other = run * kRunBlocks + lane, n = gaps_of(block, w.k);
  const auto parameter = [&](unsigned i) { return w.blocks[i].parameter; };
  const auto step_to = [&](unsigned i) {
    return zigzag(i == 0 ? w.start : parameter(i - 1), parameter(i));
  };
  RunBits before = w.runs[run];
  before.steps += sum_lanes(other < block ? step_to(other) + 1 : 0u);
  before.quotients += sum_lanes(other < block ? w.blocks[other].quotients : 0u);
  before.remainders += sum_lanes(other < block ? kGaps * parameter(other) : 0u);

  const unsigned width = parameter(block);
  const GapPair pair = load_gaps(w, block);
  if (lane == 0) put_one(w.ones, before.steps + step_to(block));
  const unsigned first = pair.gap[0] >> width, second = pair.gap[1] >> width;
  const unsigned upto = scan_lanes(first + second + 2);
  const unsigned at = all.steps + before.quotients + upto - second - 2;  // the one of the first gap
  if (2 * lane < n) put_one(w.ones, at);
  if (2 * lane + 1 < n) put_one(w.ones, at + 1 + second);

  uint8_t* const remainders = places_of(w, choice) + bytes_for(uint64_t{all.steps} + all.quotients);
  if (width > 0) write_remainders(pair, n, width, remainders + before.remainders / 8);
}

// Writes the bitmap, 32 bits at a time.
__device__ __forceinline__ void write_bitmap(const Writing& w, uint8_t* to) {
  const unsigned bytes = static_cast<unsigned>(bytes_for(w.count));
  const Entries indices{w.indices, nullptr, w.k};
  for (unsigned at = 4 * (blockIdx.x * kCompactThreads + threadIdx.x); at < bytes;
       at += 4 * gridDim.x * kCompactThreads) {
    const int64_t begin = int64_t{w.first} + int64_t{at} * 8;
    unsigned word = 0;
    for (unsigned i = lower_bound(indices, begin); i < w.k && w.indices[i] < begin + 32; ++i)
      word |= 1u << (w.indices[i] - begin);
    store_bytes(to + at, word, min(4u, bytes - at));
  }
}

template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    encode_indices(const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  const Choice choice = *w.choice;
  if (choice.all.bad) return;
  uint8_t* const to = places_of(w, choice);
  const unsigned thread = blockIdx.x * kCompactThreads + threadIdx.x;
  const unsigned threads = gridDim.x * kCompactThreads;
  if (choice.code == 0)
    for (unsigned i = thread; i < w.k; i += threads)
      store_bytes(to + size_t{4} * i, static_cast<unsigned>(index_of(w, i)), 4);
  if (choice.code == 1) write_bitmap(w, to);
  if (choice.code == 2)
    for (unsigned block = thread / 32; block < w.block_count; block += threads / 32)
      write_block(w, choice, block);
}

template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    copy_quotients(const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  const Choice choice = *w.choice;
  if (choice.all.bad || choice.code != 2) return;
  uint8_t* const to = places_of(w, choice);
  const auto bytes =
      static_cast<unsigned>(bytes_for(uint64_t{choice.all.steps} + choice.all.quotients));
  for (unsigned i = blockIdx.x * kCompactThreads + threadIdx.x; i < bytes;
       i += gridDim.x * kCompactThreads)
    to[i] = static_cast<uint8_t>(w.ones[i / 4] >> 8 * (i % 4));
}

}  // namespace pycomm::cuda
