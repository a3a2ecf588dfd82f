// Decodes the bytes of packets, which may be invalid, into indices and values. Each launch has a
// row of blocks for each packet. Its length is that of the packet that needs most, so blocks of
// others may be superfluous.
//
//   count_ones        checks the header; counts the ones in each kilobyte of the bitmap or of the
//                     quotients
//   sum_ones          one block: the number of ones before each kilobyte
//   place_ones        the position of each one; in a bitmap these are the indices. Checks a list
//   read_parameters   one block: the parameters, and the offset of the remainders of each block
//   sum_gaps          one warp per block of gaps: their sum
//   sum_runs          one block: the sum before each run of 32; checks the whole packet
//   read_indices      one warp per block: the indices; all values. Or -1 and 0
//   expand_groups     the elements of the groups, if they have several
//
// An error in one launch stops the later ones. No byte causes an access outside the packet or the
// workspace, and an index is written only after it was validated.
#pragma once

#include "cuda/compact_values.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kChunk = 4 * kCompactThreads;  // bytes per block in count_ones

using FewReadings = LaunchRows<Reading, 8>;
using ManyReadings = LaunchRows<Reading, 128>;
static_assert(sizeof(ManyReadings) <= 32000);

// Whether the bits after the last value are zero.
__device__ __forceinline__ bool end_in_zeros(const Reading& r, unsigned code, uint64_t end) {
  const unsigned width = code == kTwoBit ? 2 : code == kOneBit ? 1 : code == kThreeBit ? 3 : 0;
  const unsigned used = width * (values_of(r) % 8) % 8;
  return used == 0 || r.bytes[end - 1] >> used == 0;
}

__device__ __forceinline__ Verdict read_head(const Reading& r) {
  const Verdict bad{1, 0, 0, 0, 0, 0, 0};
  if (r.size < r.head_bytes) return bad;
  for (unsigned i = 0; i < r.head_bytes; ++i)
    if (i != 3 && r.bytes[i] != r.head[i]) return bad;
  const unsigned index_code = r.bytes[3] % 16, value_code = r.bytes[3] / 16;
  if (index_code > 2 || value_code >= kValueCodeCount) return bad;
  const uint64_t at = r.head_bytes + r.limits.value_bytes[value_code];
  if (r.size < at + r.limits.least[index_code] || r.size > at + r.limits.most[index_code])
    return bad;
  if (!end_in_zeros(r, value_code, at)) return bad;
  if (r.k == 0 && index_code == 2 && r.size != at) return bad;
  return {0, 0, r.k == r.count ? kNoIndices : index_code, value_code, at, r.size - at, 0};
}

// Whether the indices are a bitmap or have quotients.
__device__ __forceinline__ bool has_ones(const Verdict& v) {
  return v.index_code == 1 || v.index_code == 2;
}

// 32 bits of the indices; zeros after their end.
__device__ __forceinline__ unsigned word_at(const Reading& r, const Verdict& v, unsigned chunk) {
  const uint64_t at = uint64_t{chunk} * kChunk + 4 * threadIdx.x;
  if (at >= v.index_bytes) return 0;
  return load_bytes(r.bytes + v.index_at + at,
                    static_cast<unsigned>(min(uint64_t{4}, v.index_bytes - at)));
}

// Grid: one block per chunk.
template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    count_ones(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  auto& found = gpu::shared<Verdict>();
  if (blockIdx.x >= r.chunk_count) return;
  if (threadIdx.x == 0) {
    found = read_head(r);
    if (blockIdx.x == 0) *r.verdict = found;
  }
  __syncthreads();
  const Verdict v = found;
  if (v.bad != 0 || !has_ones(v)) return;
  const auto ones = static_cast<unsigned>(__popc(word_at(r, v, blockIdx.x)));
  const unsigned upto = scan_block<kCompactThreads>(ones);
  if (threadIdx.x == kCompactThreads - 1) r.chunks[blockIdx.x] = upto;
}

template <class Packets>
__global__ void __launch_bounds__(kTableThreads) sum_ones(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  const Verdict v = *r.verdict;
  if (v.bad != 0 || !has_ones(v)) return;
  const Stretch mine = stretch_of(r.chunk_count);
  unsigned all;
  unsigned before = sum_before(mine, all, [&](unsigned i) { return r.chunks[i]; });
  for (unsigned i = mine.begin; i < mine.end; ++i) {
    const unsigned here = r.chunks[i];
    r.chunks[i] = before;
    before += here;
  }
  __syncthreads();
  if (threadIdx.x != kTableThreads - 1) return;
  if (v.index_code == 1 ? all != r.k : all < r.block_count + r.k) r.verdict->bad = 1;
}

// The index that a packet has as `index`.
__device__ __forceinline__ int32_t index_from(const Reading& r, int32_t index) {
  return static_cast<int32_t>(static_cast<unsigned>(index) + r.first);
}

__device__ __forceinline__ void read_list(const Reading& r, const Verdict& v) {
  const uint8_t* const from = r.bytes + v.index_at;
  for (unsigned i = blockIdx.x * kCompactThreads + threadIdx.x; i < r.k;
       i += gridDim.x * kCompactThreads) {
    const auto index = static_cast<int32_t>(load_bytes(from + size_t{4} * i, 4));
    const int32_t before =
        i == 0 ? -1 : static_cast<int32_t>(load_bytes(from + size_t{4} * i - 4, 4));
    r.indices[i] = index_from(r, index);
    if (index <= before || static_cast<unsigned>(index) >= r.count)
      atomicOr(&r.verdict->unsorted, 1u);
  }
}

__device__ __forceinline__ void number_all(const Reading& r) {
  for (unsigned i = blockIdx.x * kCompactThreads + threadIdx.x; i < r.k;
       i += gridDim.x * kCompactThreads)
    r.indices[i] = index_from(r, static_cast<int32_t>(i));
}

// Grid: one block per chunk.
template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    place_ones(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  if (r.verdict->bad != 0) return;
  const Verdict v{0, 0, r.verdict->index_code, 0, r.verdict->index_at, r.verdict->index_bytes, 0};
  if (v.index_code == kNoIndices) return number_all(r);
  if (v.index_code == 0) return read_list(r, v);
  if (blockIdx.x >= r.chunk_count) return;
  unsigned word = word_at(r, v, blockIdx.x);
  const auto ones = static_cast<unsigned>(__popc(word));
  unsigned rank = r.chunks[blockIdx.x] + scan_block<kCompactThreads>(ones) - ones;
  const unsigned wanted = v.index_code == 1 ? r.k : r.block_count + r.k;
  const unsigned begin = 8 * (blockIdx.x * kChunk + 4 * threadIdx.x);
  for (; word != 0 && rank < wanted; word &= word - 1, ++rank) {
    const unsigned at = begin + static_cast<unsigned>(__ffs(static_cast<int>(word))) - 1;
    if (v.index_code == 2) {
      r.ones[rank] = at;
    } else {
      r.indices[rank] = index_from(r, static_cast<int32_t>(at));
      if (at >= r.count) atomicOr(&r.verdict->unsorted, 1u);
    }
  }
}

// The number of zeros before a one.
__device__ __forceinline__ unsigned zeros_before(const Reading& r, unsigned rank) {
  return r.ones[rank] - (rank == 0 ? 0 : r.ones[rank - 1] + 1);
}
__device__ __forceinline__ int step_at(const Reading& r, unsigned block) {
  const unsigned number = zeros_before(r, block);
  return number % 2 == 1 ? static_cast<int>(number / 2) + 1 : -static_cast<int>(number / 2);
}

// Whether the quotients end at the start of the remainders, these at the end of the packet, and
// padding is zero. Called by one thread.
__device__ __forceinline__ bool planes_fit(const Reading& r, Verdict& v, unsigned widths) {
  const unsigned last = r.block_count - 1;
  const uint64_t remainders = uint64_t{kGaps} * (widths - r.blocks[last].parameter) +
                              uint64_t{gaps_of(last, r.k)} * r.blocks[last].parameter;
  if (bytes_for(remainders) > v.index_bytes) return false;
  v.quotient_bytes = v.index_bytes - bytes_for(remainders);
  const uint64_t end = uint64_t{r.ones[r.block_count + r.k - 1]} + 1;
  if (bytes_for(end) != v.quotient_bytes) return false;
  const uint8_t* const from = r.bytes + v.index_at;
  const auto zeros_behind = [&](uint64_t bit) {
    return bit % 8 == 0 || from[bit / 8] >> bit % 8 == 0;
  };
  return zeros_behind(end) && zeros_behind(8 * v.quotient_bytes + remainders);
}

template <class Packets>
__global__ void __launch_bounds__(kTableThreads)
    read_parameters(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  if (r.k == 0 || r.verdict->bad != 0 || r.verdict->index_code != 2) return;
  const Stretch mine = stretch_of(r.block_count);
  unsigned all;
  unsigned parameter =
      sum_before(mine, all, [&](unsigned i) { return static_cast<unsigned>(step_at(r, i)); });
  parameter += r.start;
  bool bad = false;
  for (unsigned i = mine.begin; i < mine.end; ++i) {
    parameter += static_cast<unsigned>(step_at(r, i));
    bad |= zeros_before(r, i) > 2 * kMostWidth || parameter > kMostWidth;
    r.blocks[i].parameter = parameter;
  }
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0) r.verdict->bad = 1;
    return;
  }
  unsigned widths;
  unsigned before = sum_before(mine, widths, [&](unsigned i) { return r.blocks[i].parameter; });
  for (unsigned i = mine.begin; i < mine.end; ++i) {
    r.blocks[i].remainders = before;
    before += r.blocks[i].parameter;
  }
  __syncthreads();
  if (threadIdx.x != kTableThreads - 1) return;
  Verdict v = *r.verdict;
  v.bad = planes_fit(r, v, widths) ? 0 : 1;
  *r.verdict = v;
}

// The index increment of a gap; 0 if there is none.
__device__ __forceinline__ uint64_t growth(const Reading& r, const Verdict& v, unsigned block,
                                           unsigned place) {
  if (place >= gaps_of(block, r.k)) return 0;
  const unsigned width = r.blocks[block].parameter;
  const uint64_t at =
      (v.quotient_bytes + uint64_t{8} * r.blocks[block].remainders) * 8 + uint64_t{place} * width;
  const uint64_t quotient = zeros_before(r, r.block_count + block * kGaps + place);
  return (quotient << width) + load_bits(r.bytes + v.index_at, at, width) + 1;
}

struct SumSpace {
  unsigned sum[kRunBlocks];
};

// Grid: one block per run.
template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    sum_gaps(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  if (r.k == 0 || blockIdx.x >= r.run_count) return;
  if (r.verdict->bad != 0 || r.verdict->index_code != 2) return;
  const Verdict v{
      0, 0, 2, 0, r.verdict->index_at, r.verdict->index_bytes, r.verdict->quotient_bytes};
  auto& sums = gpu::shared<SumSpace>().sum;
  const unsigned lane = gpu::lane_id(), first = blockIdx.x * kRunBlocks;
  for (unsigned j = threadIdx.x / 32; j < kRunBlocks; j += kCompactWarps) {
    uint64_t sum = 0;
    const unsigned block = first + j;
    if (block < r.block_count) {
      const unsigned n = gaps_of(block, r.k), rank = r.block_count + block * kGaps;
      // The quotients of a block take at most 3n bits, by the choice of its parameter, so the sums
      // below do not wrap.
      const bool sound = r.ones[rank + n - 1] - r.ones[rank - 1] <= 3 * n;
      if (sound) sum = sum_lanes(growth(r, v, block, 2 * lane) + growth(r, v, block, 2 * lane + 1));
      if (lane == 0) {
        r.blocks[block].sum = static_cast<unsigned>(sum);
        if (!sound || sum > r.count) atomicOr(&r.verdict->unsorted, 1u);
      }
    }
    if (lane == 0) sums[j] = static_cast<unsigned>(sum);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint64_t all = sum_lanes(uint64_t{sums[lane]});
  if (lane == 0) r.runs[blockIdx.x] = all;
}

template <class Packets>
__global__ void __launch_bounds__(kTableThreads) sum_runs(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  const Verdict v = *r.verdict;
  uint64_t all = 0;
  if (v.bad == 0 && v.index_code == 2 && r.k > 0) {
    const Stretch mine = stretch_of(r.run_count);
    uint64_t before = sum_before(mine, all, [&](unsigned i) { return r.runs[i]; });
    for (unsigned i = mine.begin; i < mine.end; ++i) {
      const uint64_t here = r.runs[i];
      r.runs[i] = before;
      before += here;
    }
  }
  __syncthreads();
  if (threadIdx.x != kTableThreads - 1) return;
  const unsigned bad = v.bad != 0 || v.unsorted != 0 || all > r.count;
  r.verdict->bad = bad;
  *r.refused = bad;
}

// Called by a warp.
__device__ __forceinline__ void read_block(const Reading& r, const Verdict& v, unsigned block) {
  const unsigned lane = gpu::lane_id(), run = block / kRunBlocks, other = run * kRunBlocks + lane;
  const uint64_t before =
      r.runs[run] + sum_lanes(uint64_t{other < block ? r.blocks[other].sum : 0});
  const uint64_t first = growth(r, v, block, 2 * lane), second = growth(r, v, block, 2 * lane + 1);
  const uint64_t upto = before + scan_lanes(first + second);
  const unsigned i = block * kGaps + 2 * lane;
  if (i < r.k) r.indices[i] = index_from(r, static_cast<int32_t>(upto - second - 1));
  if (i + 1 < r.k) r.indices[i + 1] = index_from(r, static_cast<int32_t>(upto - 1));
}

template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    read_indices(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  const Verdict v = *r.verdict;
  const unsigned thread = blockIdx.x * kCompactThreads + threadIdx.x;
  const unsigned threads = gridDim.x * kCompactThreads;
  if (v.bad == 0 && v.index_code == 2)
    for (unsigned block = thread / 32; block < r.block_count; block += threads / 32)
      read_block(r, v, block);
  const uint8_t* const from = r.bytes + r.head_bytes;
  for (unsigned i = thread; v.bad != 0 && i < r.k; i += threads) r.indices[i] = -1;
  for (unsigned i = thread; i < values_of(r); i += threads) {
    const uint64_t at = uint64_t{i / kLevelled} * levelled_bytes(v.value_code);
    r.values[i] = v.bad != 0 ? 0 : read_value(v.value_code, from + at, i % kLevelled);
  }
}

template <class Packets>
__global__ void __launch_bounds__(kCompactThreads)
    expand_groups(const __grid_constant__ Packets packets) {
  const Reading& r = packets.of[blockIdx.y];
  const bool bad = r.verdict->bad != 0;
  for (unsigned i = blockIdx.x * kCompactThreads + threadIdx.x; i < values_of(r);
       i += gridDim.x * kCompactThreads) {
    const unsigned group = static_cast<unsigned>(r.indices[i >> r.bits]) << r.bits;
    r.elements[i] = bad ? -1 : static_cast<int32_t>(group + (i & ((1u << r.bits) - 1)));
  }
}

}  // namespace pycomm::cuda
