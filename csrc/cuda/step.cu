// Host code of the DGC step: its tables and its four launches. The kernels are in begin.cuh,
// update.cuh, select.cuh and pack.cuh.
#include "cuda/begin.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/layout.hpp"
#include "cuda/pack.cuh"
#include "cuda/select.cuh"
#include "cuda/update.cuh"

namespace pycomm::cuda {
namespace {

Rows rows_of(const kernels::DgcTables& tables, size_t grad_bytes, size_t weight_bytes) {
  Rows rows;
  const kernels::DgcPiece* next = tables.pieces.data();
  for (const kernels::DgcSelection& from : tables.selections) {
    const unsigned first_tile = rows.tiles;
    unsigned count = 0;
    for (size_t i = 0; i < from.pieces; ++i, ++next) {
      Piece piece{};
      piece.grad = next->grad;
      piece.weight = next->weight;
      piece.u = next->u;
      piece.v = next->v;
      piece.count = static_cast<unsigned>(next->count);
      piece.aligned = is_aligned(next->u, 16) && is_aligned(next->v, 16) &&
                      is_aligned(next->grad, std::min<size_t>(16, 4 * grad_bytes)) &&
                      is_aligned(next->weight, std::min<size_t>(16, 4 * weight_bytes));
      add_piece(rows, piece, count);
      count += piece.count;
    }
    Selection selection{};
    selection.indices = from.indices;
    selection.values = from.values;
    selection.u_values = from.u_values;
    selection.k = static_cast<unsigned>(from.k);
    selection.first = static_cast<unsigned>(from.first);
    add_selection(rows, selection, first_tile, count, pool_capacity(count, from.k));
  }
  return rows;
}

template <class V, class AnyPage>
void begin_pages(const Tables& t, const Rows& rows, cudaStream_t stream) {
  constexpr unsigned kSize = std::extent_v<decltype(AnyPage::pieces)>;
  const unsigned pages = (std::max(t.piece_count, t.selection_count) + kSize - 1) / kSize;
  for (unsigned i = 0; i < pages; ++i) {
    const AnyPage page = page_of<AnyPage>(rows, i);
    launch<begin<V, AnyPage>>("begin", {std::max(1u, page.selection_count), kThreads, stream}, t,
                              page);
  }
}

template <class G, class W, class V>
void run_update(const kernels::DgcStep& step, const Tables& t, cudaStream_t stream) {
  const Rule<V> rule{static_cast<V>(step.momentum), static_cast<V>(step.weight_decay),
                     static_cast<V>(step.scale), static_cast<const V*>(step.scales), step.nesterov};
  const gpu::Launch shape{t.tiles, kThreads, stream};
  if (step.weight_decay == 0)
    launch<update<false, G, G, V>>("update", shape, t, rule);
  else
    launch<update<true, G, W, V>>("update", shape, t, rule);
}

// The types of gradients and weights: those of u and v, or 16-bit gradients with either type of
// weights.
template <class V>
void update_as(const kernels::DgcStep& step, const Tables& t, cudaStream_t stream) {
  if constexpr (std::is_same_v<V, double>) {
    run_update<double, double, double>(step, t, stream);
  } else {
    with_float(step.grad_dtype, [&](auto grad) {
      using G = typename decltype(grad)::type;
      if constexpr (std::is_same_v<G, double>)
        throw InvalidArgument("float64 gradients require float64 u and v");
      else if (step.weight_dtype == step.grad_dtype)
        run_update<G, G, V>(step, t, stream);
      else
        run_update<G, float, V>(step, t, stream);
    });
  }
}

template <class V>
void run_step(const kernels::DgcStep& step, cudaStream_t stream) {
  Rows rows = rows_of(step.tables, bytes_of(step.grad_dtype),
                      step.weight_decay == 0 ? sizeof(V) : bytes_of(step.weight_dtype));
  if (rows.selections.empty()) return;
  size_t bytes = 0;
  Tables t = lay_out<V>(rows, step.workspace.data, bytes);
  check(bytes <= step.workspace.bytes, "dgc_step: the workspace is too small");
  t.found_inf = step.found_inf;
  t.masking = step.masking;
  divide_work(t, rows);
  if (rows.pieces.size() <= 16)
    begin_pages<V, SmallPage>(t, rows, stream);
  else
    begin_pages<V, LargePage>(t, rows, stream);
  if (t.tiles == 0) return;
  update_as<V>(step, t, stream);
  launch<select<V>>("select", {kDigits<V> * t.select_blocks, kThreads, stream}, t);
  launch<pack<V, true>>("pack", {t.units, kThreads, stream}, t);
}

}  // namespace

void CudaKernels::dgc_step(const kernels::DgcStep& step, kernels::Queue queue) {
  const OnDevice on(queue);
  with_wide(step.tables.dtype,
            [&](auto v) { run_step<typename decltype(v)::type>(step, stream_of(queue)); });
}

size_t CudaKernels::dgc_workspace_bytes(const kernels::DgcTables& tables) {
  size_t bytes = 0;
  with_wide(tables.dtype, [&](auto v) {
    lay_out<typename decltype(v)::type>(rows_of(tables, 1, 1), nullptr, bytes);
  });
  return bytes;
}

}  // namespace pycomm::cuda
