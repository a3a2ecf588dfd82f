// Groups of neighbours on the device. kernels/groups.h has the formulas.
//
//   store_pieces   writes the table of tensors to the workspace
//   measure_runs   one pass over the tensors, a block per run of 1024 elements: the update, and the
//                  size of each group
//   topk           of the sizes (topk.cu)
//   place_groups   one block: where the values of each tensor begin. Only the last group of a
//   tensor
//                  may be shorter
//   read_values    the values of the selected groups, one after the other
//   write_indices  of compact.hpp
//   encode_values  one block per 4096 that share levels; the rounding errors go to the residual
//
// To decode packets, read_packets of compact.hpp reads their groups and values; then
//
//   place_packets  as place_groups, one block for each packet; refuses a wrong number of values
//   expand_groups  the indices of the elements; those of a refused packet are -1
#pragma once

#include "cuda/compact_tables.cuh"
#include "cuda/search.cuh"
#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kRun = 1024;  // elements; a multiple of every group
inline constexpr unsigned kRunThreads = kRun / 4;
inline constexpr unsigned kSpread = 128;  // elements of a warp

struct GroupPiece {
  const void* theta;
  void* param;
  float* residual;
  unsigned count;
  unsigned first, first_group, first_run;  // element, group and run
  bool aligned;                            // to four elements, all of them
};

// Rows of the table: an argument, so that no host memory must outlive the call.
struct GroupPage {
  static constexpr unsigned kMost = 600;
  unsigned first, count;
  GroupPiece of[kMost];
};

// The selected groups of a tensor.
struct GroupPlace {
  unsigned begin;  // in the indices
  unsigned value;  // the first of its values
};

// Arguments of every launch.
struct GroupTables {
  GroupPiece* pieces;
  GroupPlace* places;  // [pieces]
  float* sizes;        // [groups]
  const int32_t* indices;
  float* values;
  unsigned* value_count;
  uint64_t* result;  // the same number; may be null
  unsigned piece_count, runs, groups;
  unsigned k;
  unsigned bits;  // a group has 2^bits elements
};
static_assert(sizeof(GroupPage) + sizeof(GroupTables) <= 32764);

// A packet of groups that were read.
struct Expansion {
  const int32_t* groups;  // [k]
  GroupPlace* places;     // [pieces]
  int32_t* elements;      // [value_count]
  float* values;          // likewise
  unsigned* refused;
  unsigned k, value_count;
};
using FewExpansions = LaunchRows<Expansion, 8>;
using ManyExpansions = LaunchRows<Expansion, 128>;

__global__ void __launch_bounds__(kRunThreads)
    store_pieces(const __grid_constant__ GroupTables t, const __grid_constant__ GroupPage page) {
  for (unsigned i = threadIdx.x; i < page.count; i += kRunThreads)
    t.pieces[page.first + i] = page.of[i];
}

// The last tensor whose number is at most x; number(i) ascends. Tensors without elements have the
// number of the next one.
template <class Number>
__device__ __forceinline__ unsigned last_piece(const GroupTables& t, unsigned x, Number number) {
  unsigned low = 0;
  for (unsigned count = t.piece_count; count > 1;) {
    const unsigned half = count / 2;
    const bool above = number(low + half) <= x;
    low += above ? half : 0;
    count = above ? count - half : half;
  }
  return low;
}
__device__ __forceinline__ unsigned piece_of_group(const GroupTables& t, unsigned group) {
  return last_piece(t, group, [&](unsigned i) { return t.pieces[i].first_group; });
}

struct RunSpace {
  float by_warp[kRunThreads / 32];
};

// Sums of squares that are added in pairs of neighbours.
__device__ __forceinline__ float pair(float a, float b) { return canonical(add(a, b)); }

// Writes the sizes of the groups of a run. Each thread has four neighbours; `left`: elements of the
// run.
__device__ __forceinline__ void store_sizes(const GroupTables& t, float* sizes, unsigned left,
                                            const float (&x)[4]) {
  float squares[4];
#pragma unroll
  for (unsigned e = 0; e < 4; ++e) squares[e] = canonical(multiply(x[e], x[e]));
  const unsigned first = 4 * threadIdx.x, group = 1u << t.bits;
  if (t.bits == 0) {
#pragma unroll
    for (unsigned e = 0; e < 4; ++e)
      if (first + e < left) sizes[first + e] = squares[e];
    return;
  }
  const float low = pair(squares[0], squares[1]), high = pair(squares[2], squares[3]);
  if (t.bits == 1) {
    if (first < left) sizes[first / 2] = low;
    if (first + 2 < left) sizes[first / 2 + 1] = high;
    return;
  }
  float sum = pair(low, high);
  for (unsigned width = 4; width < min(group, kSpread); width *= 2)
    sum = pair(sum, __shfl_xor_sync(gpu::kFullWarp, sum, static_cast<int>(width / 4)));
  if (group <= kSpread) {
    if (first % group == 0 && first < left) sizes[first >> t.bits] = sum;
    return;
  }
  auto& warps = gpu::shared<RunSpace>().by_warp;
  if (gpu::lane_id() == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  const unsigned each = group / kSpread;  // warps of a group: 2, 4 or 8
  if (threadIdx.x * group < kRun && threadIdx.x * group < left) {
    float sums[kRunThreads / 32];
    for (unsigned w = 0; w < each; ++w) sums[w] = warps[threadIdx.x * each + w];
    for (unsigned count = each / 2; count > 0; count /= 2)
      for (unsigned w = 0; w < count; ++w) sums[w] = pair(sums[2 * w], sums[2 * w + 1]);
    sizes[threadIdx.x] = sums[0];
  }
  __syncthreads();
}

// V: type of theta and param. kUpdates: adds the update to the residual; else it only reads.
template <class V, bool kUpdates>
__global__ void __launch_bounds__(kRunThreads) measure_runs(const __grid_constant__ GroupTables t) {
  for (unsigned run = blockIdx.x; run < t.runs; run += gridDim.x) {
    const GroupPiece& piece =
        t.pieces[last_piece(t, run, [&](unsigned i) { return t.pieces[i].first_run; })];
    const unsigned offset = (run - piece.first_run) * kRun;
    const unsigned left = min(kRun, piece.count - offset), first = 4 * threadIdx.x;
    float* const residual = piece.residual + offset;
    float x[4] = {0, 0, 0, 0};
    if (piece.aligned && first + 4 <= left) {
      Quad<float> sums = load_quad(residual + first);
      if constexpr (kUpdates) {
        const Quad<V> theta = load_quad(static_cast<const V*>(piece.theta) + offset + first);
        V* const param = static_cast<V*>(piece.param) + offset + first;
        const Quad<V> after = load_quad(static_cast<const V*>(param));
#pragma unroll
        for (unsigned e = 0; e < 4; ++e)
          sums.at[e] = canonical(add(sums.at[e], add(widen(theta.at[e]), -widen(after.at[e]))));
        store_quad(residual + first, sums);
        store_quad(param, theta);
      }
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) x[e] = sums.at[e];
    } else {
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) {
        const unsigned i = first + e;
        if (i >= left) continue;
        x[e] = gpu::load(static_cast<const float*>(residual) + i);
        if constexpr (kUpdates) {
          const V theta = gpu::load(static_cast<const V*>(piece.theta) + offset + i);
          V* const param = static_cast<V*>(piece.param) + offset + i;
          const float after = widen(gpu::load(static_cast<const V*>(param)));
          x[e] = canonical(add(x[e], add(widen(theta), -after)));
          gpu::store(residual + i, x[e]);
          gpu::store(param, theta);
        }
      }
    }
    store_sizes(t, t.sizes + piece.first_group + (offset >> t.bits), left, x);
  }
}

// The selected groups of a tensor, and by how many elements its last one is short, if selected.
struct Chosen {
  unsigned begin, end, shortage;
};
__device__ __forceinline__ Chosen chosen_of(const GroupTables& t, const Entries& groups,
                                            unsigned p) {
  const GroupPiece& piece = t.pieces[p];
  const unsigned count = (piece.count + (1u << t.bits) - 1) >> t.bits;
  const unsigned end_group = piece.first_group + count;
  const unsigned begin = lower_bound(groups, static_cast<int32_t>(piece.first_group));
  const unsigned end = lower_bound(groups, static_cast<int32_t>(end_group));
  const bool last = end > begin && static_cast<unsigned>(groups.indices[end - 1]) + 1 == end_group;
  return {begin, end, last ? (count << t.bits) - piece.count : 0};
}

// Called by a block. Returns the number of values of these groups in the last thread.
__device__ __forceinline__ unsigned place_values(const GroupTables& t, const Entries& groups,
                                                 GroupPlace* places) {
  const Stretch mine = stretch_of(t.piece_count);
  unsigned all = 0;
  unsigned missing =
      sum_before(mine, all, [&](unsigned p) { return chosen_of(t, groups, p).shortage; });
  for (unsigned p = mine.begin; p < mine.end; ++p) {
    const Chosen chosen = chosen_of(t, groups, p);
    places[p] = {chosen.begin, (chosen.begin << t.bits) - missing};
    missing += chosen.shortage;
  }
  return (groups.count << t.bits) - all;
}

// One block.
__global__ void __launch_bounds__(kTableThreads)
    place_groups(const __grid_constant__ GroupTables t) {
  const unsigned values = place_values(t, {t.indices, nullptr, t.k}, t.places);
  if (threadIdx.x != kTableThreads - 1) return;
  *t.value_count = values;
  if (t.result != nullptr) *t.result = *t.value_count;
}

// Where an element of a selected group is: in the residual of a tensor, or nowhere.
struct Spot {
  float* at;
  unsigned value;
};
__device__ __forceinline__ Spot spot_of(const GroupTables& t, unsigned slot, unsigned element) {
  const auto group = static_cast<unsigned>(t.indices[slot]);
  if (group >= t.groups) return {nullptr, 0};
  const unsigned p = piece_of_group(t, group);
  const GroupPiece& piece = t.pieces[p];
  const unsigned i = ((group - piece.first_group) << t.bits) + element;
  const GroupPlace place = t.places[p];
  if (i >= piece.count) return {nullptr, 0};
  return {piece.residual + i, place.value + ((slot - place.begin) << t.bits) + element};
}

// kWrites: the values to the residual, not more than `count`; else the opposite direction.
template <bool kWrites>
__global__ void __launch_bounds__(kRunThreads)
    move_values(const __grid_constant__ GroupTables t, unsigned count) {
  const uint64_t elements = uint64_t{t.k} << t.bits;
  for (uint64_t i = uint64_t{blockIdx.x} * kRunThreads + threadIdx.x; i < elements;
       i += uint64_t{gridDim.x} * kRunThreads) {
    const Spot spot = spot_of(t, static_cast<unsigned>(i >> t.bits),
                              static_cast<unsigned>(i) & ((1u << t.bits) - 1));
    if (spot.at == nullptr || spot.value >= count) continue;
    if constexpr (kWrites)
      *spot.at = t.values[spot.value];
    else
      t.values[spot.value] = *spot.at;
  }
}

__global__ void __launch_bounds__(kValueThreads)
    encode_values(const __grid_constant__ GroupTables t, const __grid_constant__ Writing w) {
  const Choice choice = *w.choice;
  if (choice.all.bad) return;
  auto& own = gpu::shared<ValueSpace>().value;
  const unsigned count = *t.value_count;
  for (uint64_t first = uint64_t{blockIdx.x} * kLevelled; first < count;
       first += uint64_t{gridDim.x} * kLevelled) {
    const auto n = static_cast<unsigned>(min(uint64_t{kLevelled}, count - first));
    uint8_t* const to =
        w.out + choice.head_bytes + first / kLevelled * levelled_bytes(w.value_code);
    for (unsigned i = threadIdx.x; i < n; i += kValueThreads) own[i] = t.values[first + i];
    __syncthreads();
    write_levels(w.value_code, n, to);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += kValueThreads) {
      const auto value = static_cast<unsigned>(first) + i;
      const unsigned p = last_piece(t, value, [&](unsigned j) { return t.places[j].value; });
      const GroupPlace place = t.places[p];
      const unsigned slot = place.begin + ((value - place.value) >> t.bits);
      const float error = add(own[i], -read_value(w.value_code, to, i));
      const bool finite = magnitude(error) < 0x7f800000u;
      *spot_of(t, slot, (value - place.value) & ((1u << t.bits) - 1)).at = finite ? error : 0;
    }
    __syncthreads();
  }
}

// Grid: a block for each packet.
template <class Packets>
__global__ void __launch_bounds__(kTableThreads)
    place_packets(const __grid_constant__ GroupTables t, const __grid_constant__ Packets packets) {
  const Expansion& e = packets.of[blockIdx.y];
  if (*e.refused != 0) return;
  const unsigned values = place_values(t, {e.groups, nullptr, e.k}, e.places);
  if (threadIdx.x == kTableThreads - 1 && values != e.value_count) *e.refused = 1;
}

template <class Packets>
__global__ void __launch_bounds__(kRunThreads)
    expand_groups(const __grid_constant__ GroupTables t, const __grid_constant__ Packets packets) {
  const Expansion& e = packets.of[blockIdx.y];
  const bool refused = *e.refused != 0;
  for (unsigned i = blockIdx.x * kRunThreads + threadIdx.x; i < e.value_count;
       i += gridDim.x * kRunThreads) {
    if (refused) {
      e.elements[i] = -1;
      e.values[i] = 0;
      continue;
    }
    const unsigned p = last_piece(t, i, [&](unsigned j) { return e.places[j].value; });
    const GroupPlace place = e.places[p];
    const GroupPiece& piece = t.pieces[p];
    const unsigned offset = i - place.value;
    const auto group = static_cast<unsigned>(e.groups[place.begin + (offset >> t.bits)]);
    const unsigned within = offset & ((1u << t.bits) - 1);
    e.elements[i] =
        static_cast<int32_t>(piece.first + ((group - piece.first_group) << t.bits) + within);
  }
}

}  // namespace pycomm::cuda
