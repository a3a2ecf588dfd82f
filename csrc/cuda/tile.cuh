// The elements of a tile, spread over the threads of a block.
#pragma once

#include "cuda/tables.cuh"

namespace pycomm::cuda {

// The elements of one thread in a tile: element e of row r is number
// ((warp * kRows + r) * 32 + lane) * 4 + e. So the rows of a warp are consecutive.
template <class T>
struct Share {
  Quad<T> row[kRows];
};

__device__ __forceinline__ unsigned place_in_tile(unsigned row) {
  return ((threadIdx.x / 32 * kRows + row) * 32 + gpu::lane_id()) * 4;
}

// `left`: elements of the array from the start of the tile. kWhole: `left` is at least kTile, and
// p is aligned.
template <bool kWhole, class T>
__device__ __forceinline__ Share<T> load_share(const T* p, unsigned left) {
  Share<T> share;
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) {
    const unsigned i = place_in_tile(r);
    if constexpr (kWhole) {
      share.row[r] = load_quad(p + i);
    } else {
#pragma unroll
      for (unsigned e = 0; e < 4; ++e)
        share.row[r].at[e] = i + e < left ? gpu::load(p + i + e) : T{};
    }
  }
  return share;
}

template <bool kWhole, class T>
__device__ __forceinline__ void store_share(T* p, const Share<T>& share, unsigned left) {
#pragma unroll
  for (unsigned r = 0; r < kRows; ++r) {
    const unsigned i = place_in_tile(r);
    if constexpr (kWhole) {
      store_quad(p + i, share.row[r]);
    } else {
#pragma unroll
      for (unsigned e = 0; e < 4; ++e)
        if (i + e < left) gpu::store(p + i + e, share.row[r].at[e]);
    }
  }
}

}  // namespace pycomm::cuda
