// Tables of a selection step, in the caller's workspace on the device.
//
// Tensors ("pieces") are split into tiles of kTile elements; a selection chooses k elements from
// several concatenated pieces. A step has four launches:
//
//   begin    writes the tables and clears the counters
//   update   one pass over the tensors; elements at or above the lower bound enter the pool
//   select   finds the exact k-th magnitude, from the pool
//   pack     writes exactly k elements in index order
//
// If the pool of a selection has fewer than k elements, or overflowed, select and pack read all
// tensors of that selection instead (repair). This needs no launch of its own, so the sequence of
// launches is constant and a CUDA graph can capture it.
#pragma once

#include "cuda/block.cuh"
#include "cuda/numbers.cuh"

namespace pycomm::cuda {

inline constexpr unsigned kThreads = 256;
inline constexpr unsigned kRows = 4;                     // 4 elements per thread in each row
inline constexpr unsigned kTile = kThreads * 4 * kRows;  // 4096 elements, 16 per thread
inline constexpr unsigned kWarps = kThreads / 32;
inline constexpr unsigned kPackBlocks = 4;          // of pack, on a multiprocessor
inline constexpr uint64_t kNoBound = ~uint64_t{0};  // no element enters the pool

struct Piece {
  const void* grad;
  const void* weight;
  void* u;
  void* v;  // for topk: the array
  unsigned count;
  unsigned first_tile;
  unsigned place;  // position of its first element in the selection
  unsigned selection;
  bool aligned;  // to 16 bytes (grad and weight: four of their elements), all of them
};

struct Selection {
  int32_t* indices;
  void* values;
  void* u_values;
  unsigned k;
  unsigned count;  // elements of its pieces
  unsigned first;  // added to every index
  unsigned first_tile, tiles;
  unsigned first_unit;  // of pack: runs of tiles, Tables::run of them in each
  unsigned pool, capacity;
};

// State kept between steps; zero before the first.
struct Memory {
  uint64_t bound;  // lower bound of the next step, plus 1; 0: none
  uint64_t reach;  // the 1.5k-th magnitude of the last step, plus 1
};

// `select` finds the magnitudes of two ranks digit by digit: k, and the one at `reach_of`.
struct State {
  uint64_t bound;     // of this step
  uint64_t kth;       // the k-th magnitude
  uint64_t reach;     // the magnitude down to which the pool should reach; two digits of it
  unsigned ties;      // the rank of the k-th among the elements that begin with these digits; in
                      // the end: elements of the k-th magnitude among the k
  unsigned left;      // the same for `reach`
  unsigned count;     // elements at or above the lower bound
  unsigned finished;  // units that blocks of `select` have counted, over all digits
  unsigned digits;    // that are known
};

struct Header {
  unsigned select, pack;  // next tickets
};
struct Span {  // the pool entries of a tile
  unsigned first, count;
};
struct Counts {
  unsigned greater, equal;  // than the k-th magnitude
};
using PackedCounts = unsigned long long;  // 0: not yet known

struct Tables {
  Header* header;
  Memory* memory;
  State* states;
  Piece* pieces;
  unsigned* first_tiles;  // [pieces]
  Selection* selections;
  unsigned* bins;             // [selections, kBins]
  Span* spans;                // [tiles]
  PackedCounts* unit_counts;  // [units]
  unsigned* pool_places;
  void* pool_values;
  void* threshold;  // topk's; may be null
  const float* found_inf;
  unsigned piece_count, selection_count, tiles, units;
  unsigned run;            // tiles of a unit, a multiple of kWarps
  unsigned select_blocks;  // for one digit
  bool masking;
};

__device__ __forceinline__ bool stopped(const Tables& t) {
  return t.found_inf != nullptr && *t.found_inf != 0.f;
}

// Whether the pool of a selection is too small or overflowed.
__device__ __forceinline__ bool needs_all(const Selection& selection, const State& state) {
  return state.count < selection.k || state.count > selection.capacity;
}

// The piece of a tile. Called by a warp.
__device__ __forceinline__ const Piece& piece_of(const Tables& t, unsigned tile) {
  return t.pieces[find_last(t.piece_count, tile, [&](unsigned i) { return t.first_tiles[i]; })];
}

// The number of the piece, for a tile of each lane.
__device__ __forceinline__ unsigned piece_of_lane(const Tables& t, unsigned tile) {
  unsigned low = 0;
  for (unsigned count = t.piece_count; count > 1;) {
    const unsigned half = count / 2;
    const bool above = t.first_tiles[low + half] <= tile;
    low += above ? half : 0;
    count = above ? count - half : half;
  }
  return low;
}

// The same for a block, whose warps need not search all pieces.
__device__ __forceinline__ const Piece& piece_of_block(const Tables& t, unsigned tile) {
  if (t.piece_count == 1) return t.pieces[0];
  unsigned begun = 0;  // pieces that begin at or before the tile
  for (unsigned first = 0; first < t.piece_count; first += kThreads) {
    const unsigned i = first + threadIdx.x;
    begun +=
        static_cast<unsigned>(__syncthreads_count(i < t.piece_count && t.first_tiles[i] <= tile));
  }
  return t.pieces[begun - 1];
}

// The elements that select and pack read: a part of the pool, or a tile of a tensor.
template <class V>
struct Items {
  const V* values;
  unsigned place;  // of the first one in the selection; unused for the pool
  unsigned count;
  bool aligned;  // to four elements or 16 bytes
};

template <class V>
__device__ __forceinline__ Items<V> items_of_tile(const Piece& piece, unsigned tile) {
  const unsigned offset = (tile - piece.first_tile) * kTile;
  return {static_cast<const V*>(piece.v) + offset, piece.place + offset,
          min(kTile, piece.count - offset), piece.aligned};
}
template <class V>
__device__ __forceinline__ Items<V> items_of_pool(const Tables& t, const Selection& selection,
                                                  Span span) {
  const unsigned at = selection.pool + span.first;
  return {static_cast<const V*>(t.pool_values) + at, 0, span.count, at % 4 == 0};
}

}  // namespace pycomm::cuda
