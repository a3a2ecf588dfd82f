// topk and threshold of the processor: one read of x, and what select.h makes of the candidates.
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/sample.h"
#include "kernels/cpu/select.h"

namespace pycomm::cpu {
namespace {

template <Dtype kDtype>
using ElementOfDtype = std::conditional_t<is_half(kDtype), uint16_t, Stored<kDtype>>;

size_t bytes_needed(size_t count, size_t k, size_t element_bytes) {
  // Rounded up three times by Room, and once more for an address that is not aligned.
  return pool_bytes(pool_capacity(count, k), tiles_of(count), element_bytes) + 64;
}

template <typename Element>
void select(const TypedArray& x, const DeviceKernels::TopK& what) {
  const auto* elements = static_cast<const Element*>(x.data);
  Selection<Element> selection;
  selection.choices.emplace_back();
  selection.choices[0].k = what.k;
  selection.add(0, elements, x.count, 0);
  Room room(what.workspace.data, what.workspace.bytes);
  const size_t capacity = pool_capacity(x.count, what.k);
  selection.take_pool(room, capacity, tiles_of(x.count));
  if (capacity > 0)
    selection.choices[0].floor =
        sample_floor(x.count, what.k, [elements](size_t i) { return elements[i]; });
  if (selection.choices[0].floor != 0)
    parallel(selection.slices.size(), [&, isa = best_isa()](size_t s) {
      for (size_t tile = 0; tile < tiles_of(selection.slices[s].count); ++tile)
        selection.collect(isa, selection.slices[s], tile);
    });
  selection.cut();
  if (what.threshold != nullptr)
    *static_cast<Element*>(what.threshold) = std::bit_cast<Element>(selection.choices[0].kth);
  if (what.indices == nullptr) return;
  parallel(selection.slices.size(), [&](size_t s) {
    selection.emit(selection.slices[s], [&](size_t at, size_t place) {
      what.indices[at] = static_cast<int32_t>(place);
      static_cast<Element*>(what.values)[at] = elements[place];
    });
  });
}

}  // namespace

void CpuKernels::topk(TypedArray x, const TopK& what, Queue) {
  with_float(x.dtype, [&](auto dtype) { select<ElementOfDtype<dtype()>>(x, what); });
}

size_t CpuKernels::topk_workspace_bytes(size_t count, size_t k, Dtype dtype) {
  return bytes_needed(count, k, bytes_of(dtype));
}

}  // namespace pycomm::cpu
