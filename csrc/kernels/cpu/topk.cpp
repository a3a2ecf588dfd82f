// topk and threshold on the CPU: one read of x, then the selection of select.h.
#include "core/visit_float.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/sample.h"
#include "kernels/cpu/select.h"

namespace pycomm::kernels {
namespace {

template <Dtype kDtype>
using ElementOfDtype = std::conditional_t<is_half(kDtype), uint16_t, cpu::Stored<kDtype>>;

template <typename Element>
void select(const TypedArray& x, const DeviceKernels::TopK& what) {
  const auto* const elements = static_cast<const Element*>(x.data);
  BumpAllocator allocator(what.workspace.data, what.workspace.bytes);
  Selection<Element> selection;
  selection.open(x.count, what.k, allocator);
  selection.add(0, elements, x.count);
  const auto& choice = selection.choices[0];
  if (!choice.dense) {
    const auto bound = sample_bound(x.count, what.k, [=](size_t i) { return elements[i]; });
    selection.collect(cpu::isa_here(), choice, bound);
    if (selection.candidates(choice) < what.k) selection.collect(cpu::isa_here(), choice, 0);
  }
  selection.cut(0, [](size_t) {});
  if (what.threshold != nullptr)
    *static_cast<Element*>(what.threshold) = std::bit_cast<Element>(choice.kth);
  if (what.indices == nullptr) return;
  selection.each_part([&](Part<Element>& part) {
    selection.emit(part, [&](size_t at, Element element, const Slice<Element>&, size_t i) {
      what.indices[at] = static_cast<int32_t>(i);
      static_cast<Element*>(what.values)[at] = element;
    });
  });
}

}  // namespace

void CpuKernels::topk(TypedArray x, const TopK& what, Queue) {
  visit_float(x.dtype, [&](auto dtype) { select<ElementOfDtype<dtype()>>(x, what); });
}

size_t CpuKernels::topk_workspace_bytes(size_t count, size_t k, Dtype dtype) {
  return Shape(count, k).bytes(bytes_of(dtype));
}

}  // namespace pycomm::kernels
