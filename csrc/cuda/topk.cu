// topk and threshold: a lower bound from a sample, one pass over the array, and the selection of a
// step.
#include <cmath>

#include "cuda/begin.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/layout.hpp"
#include "cuda/pack.cuh"
#include "cuda/select.cuh"
#include "cuda/update.cuh"

namespace pycomm::cuda {
namespace {

Rows rows_of_topk(size_t count, size_t k, void* x, const kernels::DeviceKernels::TopK* what) {
  Rows rows;
  Piece piece{};
  piece.v = x;
  piece.count = static_cast<unsigned>(count);
  piece.aligned = is_aligned(x, 16);
  add_piece(rows, piece, 0);
  Selection selection{};
  selection.k = static_cast<unsigned>(k);
  if (what != nullptr) {
    selection.indices = what->indices;
    selection.values = what->values;
  }
  // A sample is less accurate than the bound of a previous step: twice the capacity.
  const size_t capacity = 2 * size_t{pool_capacity(count, k)} + count / 1024;
  add_selection(rows, selection, 0, piece.count, static_cast<unsigned>(std::min(count, capacity)));
  return rows;
}

// The rank in a sample such that k of `count` elements are above it, with four standard deviations
// of margin; 0 if the pool would be too large to be worthwhile.
unsigned sample_rank(size_t count, size_t k) {
  if (k > count / 16 && count > kSample) return 0;
  const double hits = static_cast<double>(k) * kSample / static_cast<double>(count);
  return static_cast<unsigned>(std::min<double>(kSample, hits + 4 * std::sqrt(hits) + 2));
}

template <class V>
void run_topk(kernels::TypedArray x, const kernels::DeviceKernels::TopK& what,
              cudaStream_t stream) {
  Rows rows = rows_of_topk(x.count, what.k, x.data, &what);
  size_t bytes = 0;
  Tables t = lay_out<V>(rows, what.workspace.data, bytes);
  check(bytes <= what.workspace.bytes, "topk: the workspace is too small");
  t.threshold = what.threshold;
  divide_work(t, rows);
  launch<begin_topk<V>>("begin_topk", {1, kSampleThreads, stream}, t, page_of<SmallPage>(rows, 0),
                        sample_rank(x.count, what.k));
  launch<collect<V>>("collect", {t.tiles, kThreads, stream}, t);
  launch<select<V>>("select", {kDigits<V> * t.select_blocks, kThreads, stream}, t);
  if (what.indices != nullptr || what.values != nullptr)
    launch<pack<V, false>>("pack", {t.units, kThreads, stream}, t);
}

}  // namespace

void CudaKernels::topk(kernels::TypedArray x, const TopK& what, kernels::Queue queue) {
  if (what.k == 0) return;
  const OnDevice on(queue);
  with_float(x.dtype,
             [&](auto v) { run_topk<typename decltype(v)::type>(x, what, stream_of(queue)); });
}

size_t CudaKernels::topk_workspace_bytes(size_t count, size_t k, Dtype dtype) {
  size_t bytes = 0;
  with_float(dtype, [&](auto v) {
    lay_out<typename decltype(v)::type>(rows_of_topk(count, k, nullptr, nullptr), nullptr, bytes);
  });
  return bytes;
}

}  // namespace pycomm::cuda
