// The DGC step on the CPU: one pass over memory updates u and v and collects candidates with the
// lower bound from the last step; select.h then selects. device_kernels.h has the formula and the
// contract.
#include <cstring>
#include <vector>

#include "core/visit_float.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/sample.h"
#include "kernels/cpu/select.h"
#include "kernels/cpu/update.h"

namespace pycomm::kernels {
namespace {

// State of one selection for the next step, at the start of the workspace. Any bits are valid: they
// only set a lower bound.
struct SelectionMemory {
  double bound;  // 0: unknown
  double kth;    // the last step's k-th magnitude
};

// Distance of the next lower bound from the k-th magnitude: the magnitude of rank 1.5 k, times the
// trend if that falls, as on CUDA. A bound that is too high costs a second read of v. The sent
// elements are zero now, so the next k winners are elements below the cut that gradients raise
// above it.
constexpr size_t bound_rank(size_t k) { return k + k / 2; }

template <typename Real>
using KeyOf = decltype(cpu::key_of(Real{}));

template <typename Real>
using UpdateFunction = void (*)(Elements<Real>, size_t, size_t, Numbers<Real>, KeyOf<Real>*);

template <cpu::Isa kIsa, Dtype kGrad, Dtype kWeight, typename Real>
UpdateFunction<Real> update_for(bool nesterov, bool decay) {
  const auto pick = [](auto with_nesterov, auto with_decay) -> UpdateFunction<Real> {
    using Loop = UpdateRange<kGrad, kWeight, with_nesterov(), with_decay()>;
    return cpu::On<kIsa>::template run<Loop, Elements<Real>, size_t, size_t, Numbers<Real>,
                                       KeyOf<Real>*>;
  };
  if (nesterov)
    return decay ? pick(std::true_type(), std::true_type())
                 : pick(std::true_type(), std::false_type());
  return decay ? pick(std::false_type(), std::true_type())
               : pick(std::false_type(), std::false_type());
}

template <Dtype kGrad, Dtype kWeight, typename Real>
UpdateFunction<Real> update_on([[maybe_unused]] cpu::Isa isa, bool nesterov, bool decay) {
#ifdef __x86_64__
  if (isa >= cpu::Isa::avx512)
    return update_for<cpu::Isa::avx512, kGrad, kWeight, Real>(nesterov, decay);
  if (isa == cpu::Isa::avx2)
    return update_for<cpu::Isa::avx2, kGrad, kWeight, Real>(nesterov, decay);
#endif
  return update_for<cpu::Isa::baseline, kGrad, kWeight, Real>(nesterov, decay);
}

template <typename Real>
UpdateFunction<Real> find_update(cpu::Isa isa, const DgcStep& step) {
  const bool decay = step.weight_decay != 0;
  if constexpr (std::is_same_v<Real, double>) {
    return update_on<Dtype::float64, Dtype::float64, Real>(isa, step.nesterov, decay);
  } else {
    const bool wide = step.weight_dtype == Dtype::float32;
    const auto pick = [&](auto grad) {
      return wide ? update_on<grad(), Dtype::float32, Real>(isa, step.nesterov, decay)
                  : update_on<grad(), grad(), Real>(isa, step.nesterov, decay);
    };
    if (step.grad_dtype == Dtype::float16)
      return pick(std::integral_constant<Dtype, Dtype::float16>());
    if (step.grad_dtype == Dtype::bfloat16)
      return pick(std::integral_constant<Dtype, Dtype::bfloat16>());
    return pick(std::integral_constant<Dtype, Dtype::float32>());
  }
}

size_t count_of(std::span<const DgcPiece> pieces) {
  size_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count;
}

template <typename Real>
class StepRun {
 public:
  StepRun(const DgcStep& step, cpu::Isa isa)
      : step_(step), isa_(isa), update_(find_update<Real>(isa, step)) {
    BumpAllocator allocator(step.workspace.data, step.workspace.bytes);
    memory_ = allocator.take<SelectionMemory>(step.tables.selections.size());
    size_t piece = 0;
    for (const auto& selection : step.tables.selections) {
      lay_out(selection, piece, allocator);
      piece += selection.pieces;
    }
  }

  void run() {
    parallel(selection_.parts.size(), [this](size_t p) {
      const cpu::ExactFloats exact;
      update_and_collect(selection_.parts[p]);
    });
    for (size_t c = 0; c < selection_.choices.size(); ++c) repair(c);
    std::vector<Key> lows(selection_.choices.size());
    selection_.cut(lows.size(), [&](size_t c) { lows[c] = low(selection_.choices[c]); });
    for (size_t c = 0; c < lows.size(); ++c) remember(c, lows[c]);
    parallel(selection_.parts.size(), [this](size_t p) { send(selection_.parts[p]); });
  }

 private:
  using Key = KeyOf<Real>;

  Numbers<Real> numbers(size_t piece) const {
    const auto* scales = static_cast<const Real*>(step_.scales);
    return {.momentum = static_cast<Real>(step_.momentum),
            .decay = static_cast<Real>(step_.weight_decay),
            .scale = scales != nullptr ? scales[piece] : static_cast<Real>(step_.scale)};
  }

  Elements<Real> elements(size_t piece) const {
    const DgcPiece& p = step_.tables.pieces[piece];
    return {p.grad, p.weight, static_cast<Real*>(p.u), static_cast<Real*>(p.v)};
  }

  void lay_out(const DgcSelection& selection, size_t first_piece, BumpAllocator& allocator) {
    const auto pieces = step_.tables.pieces.subspan(first_piece, selection.pieces);
    const size_t count = count_of(pieces);
    selection_.open(count, selection.k, allocator);
    for (size_t i = 0; i < pieces.size(); ++i)
      selection_.add(first_piece + i, static_cast<const Real*>(pieces[i].v), pieces[i].count);
    const auto& choice = selection_.choices.back();
    if (choice.dense) return;
    const Key bound = first_bound(choice, count);
    for (auto& part : selection_.parts_of(choice)) part.pool.begin(bound);
  }

  // The bound from the last step, or an estimate from a sample of the future v.
  Key first_bound(const Choice<Real>& choice, size_t count) const {
    const double known = memory_[&choice - selection_.choices.data()].bound;
    if (known > 0 && std::isfinite(known)) return cpu::key_of(static_cast<Real>(known));
    const cpu::ExactFloats exact;
    return sample_bound(count, choice.k, [this, at = begin_of(choice)](size_t i) mutable {
      while (i >= at->place + at->begin + at->count) ++at;
      return v_after(at->piece, i - at->place);
    });
  }

  const Slice<Real>* begin_of(const Choice<Real>& choice) const {
    return selection_.slices.data() + selection_.parts[choice.first_part].first_slice;
  }

  Real v_after(size_t piece, size_t i) const {
    Elements<Real> e = elements(piece);
    Real u = e.u[i], v = e.v[i];
    const size_t grad_bytes = bytes_of(step_.grad_dtype),
                 weight_bytes = bytes_of(step_.weight_dtype);
    e.grad = static_cast<const std::byte*>(e.grad) + i * grad_bytes;
    if (e.weight != nullptr) e.weight = static_cast<const std::byte*>(e.weight) + i * weight_bytes;
    e.u = &u;
    e.v = &v;
    Key largest;
    update_(e, 0, 1, numbers(piece), &largest);
    return v;
  }

  void update_and_collect(Part<Real>& part) {
    std::array<Key, kTile / kGroup> largest;
    const bool dense = selection_.choices[part.choice].dense;
    for (const auto& slice : selection_.slices_of(part)) {
      const Elements<Real> e = elements(slice.piece);
      const Numbers<Real> n = numbers(slice.piece);
      for (size_t i = 0; i < slice.count; i += kTile) {
        const size_t begin = slice.begin + i, count = std::min(kTile, slice.count - i);
        update_(e, begin, count, n, largest.data());
        if (!dense) selection_.collect(isa_, part.pool, slice, begin, count, largest.data());
      }
    }
  }

  // The bound was too high: reads v again, with a bound from a sample, and finally with 0.
  void repair(size_t c) {
    const auto& choice = selection_.choices[c];
    if (choice.dense || selection_.candidates(choice) >= choice.k) return;
    size_t count = 0;
    for (const auto& part : selection_.parts_of(choice))
      for (const auto& slice : selection_.slices_of(part)) count += slice.count;
    const Key bound = sample_bound(count, choice.k, [at = begin_of(choice)](size_t i) mutable {
      while (i >= at->place + at->begin + at->count) ++at;
      return at->elements[i - at->place];
    });
    selection_.collect(isa_, choice, bound);
    if (selection_.candidates(choice) < choice.k) selection_.collect(isa_, choice, 0);
  }

  // The magnitude of that rank, or of the last candidate.
  Key low(const Choice<Real>& choice) const {
    if (choice.dense) return 0;
    size_t ties = 0;
    const size_t rank = std::min(bound_rank(choice.k), selection_.candidates(choice));
    return selection_.candidate(choice, rank, ties);
  }

  void remember(size_t c, Key low) {
    const auto& choice = selection_.choices[c];
    SelectionMemory& memory = memory_[c];
    if (choice.dense) return;
    const auto kth = static_cast<double>(std::bit_cast<Real>(choice.kth));
    const double trend = memory.kth > 0 && std::isfinite(kth) ? kth / memory.kth : 1;
    memory = {static_cast<double>(std::bit_cast<Real>(low)) * std::clamp(trend, 0.5, 1.0), kth};
  }

  void send(Part<Real>& part) {
    const DgcSelection& selection = step_.tables.selections[part.choice];
    auto* const values = static_cast<Real*>(selection.values);
    auto* const u_values = static_cast<Real*>(selection.u_values);
    selection_.emit(part, [&](size_t at, Real v, const Slice<Real>& slice, size_t i) {
      const Elements<Real> e = elements(slice.piece);
      const Real u = e.u[i];
      selection.indices[at] = static_cast<int32_t>(selection.first + slice.place + i);
      values[at] = v;
      if (u_values != nullptr) u_values[at] = u;
      e.v[i] = 0;
      if (step_.masking || !cpu::is_finite(v)) e.u[i] = 0;
    });
  }

  const DgcStep& step_;
  cpu::Isa isa_;
  UpdateFunction<Real> update_;
  SelectionMemory* memory_ = nullptr;
  Selection<Real> selection_;
};

void send_nothing(const DgcTables& tables) {
  for (const auto& selection : tables.selections) {
    for (size_t i = 0; i < selection.k; ++i)
      selection.indices[i] = static_cast<int32_t>(selection.first + i);
    std::memset(selection.values, 0, selection.k * bytes_of(tables.dtype));
    if (selection.u_values != nullptr)
      std::memset(selection.u_values, 0, selection.k * bytes_of(tables.dtype));
  }
}

}  // namespace

void CpuKernels::dgc_step(const DgcStep& step, Queue) {
  if (step.found_inf != nullptr && *step.found_inf != 0) return send_nothing(step.tables);
  visit_real(step.tables.dtype,
             [&](auto dtype) { StepRun<cpu::Stored<dtype()>>(step, cpu::isa_here()).run(); });
}

size_t CpuKernels::dgc_workspace_bytes(const DgcTables& tables) {
  size_t bytes = tables.selections.size() * sizeof(SelectionMemory);
  auto pieces = tables.pieces;
  for (const auto& selection : tables.selections) {
    const size_t count = count_of(pieces.first(selection.pieces));
    pieces = pieces.subspan(selection.pieces);
    bytes += Shape(count, selection.k).bytes(bytes_of(tables.dtype));
  }
  return bytes;
}

}  // namespace pycomm::kernels
