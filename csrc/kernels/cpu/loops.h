// The element loops of the reductions. Included by reduce.cpp only, so that the program has one
// copy of each loop.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "cpu/arithmetic.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/half_vectors.h"

namespace pycomm::kernels {

// Values of one chunk: 4 KiB, so that two chunks and their sources stay in the L1 cache.
template <Dtype kDtype>
using Values = std::array<cpu::Value<kDtype>, 4096 / sizeof(cpu::Value<kDtype>)>;

template <Dtype kDtype, ReduceOp kOp>
struct Finish {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* a, const void* b, size_t count,
                                         int size) {
    if constexpr (HalfVector<kIsa, kDtype>::kBytes > 0) {
      const auto slot = [=](int i) { return i == 0 ? a : b; };
      HalfLoop<kIsa, kDtype, kOp>::run(out, slot, count, 2, size);
    } else {
      // `ivdep`: out may be a or b, element by element, which does not prevent vectorization.
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i)
        cpu::store<kDtype>(out, i, one(cpu::load<kDtype>(a, i), cpu::load<kDtype>(b, i), size));
    }
  }

 private:
  [[gnu::always_inline]] static cpu::Value<kDtype> one(cpu::Value<kDtype> a, cpu::Value<kDtype> b,
                                                       int size) {
    return cpu::last<kOp>(cpu::combine<cpu::kOpOf<kDtype, kOp>>(a, b), size);
  }
};

template <Dtype kDtype, ReduceOp kOp>
struct Reduce {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* a, const void* b, size_t count) {
    constexpr ReduceOp kUnfinished = kOp == ReduceOp::avg ? ReduceOp::sum : kOp;
    Finish<kDtype, kUnfinished>::template run<kIsa>(out, a, b, count, 1);
  }
};

// Two slots are one finish(). More are processed by chunk: all slots of a chunk are read before
// `out` is written, so `out` may be any of them.
template <Dtype kDtype, ReduceOp kOp>
struct Join {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* const* slots, size_t count,
                                         int size) {
    over<kIsa>(out, [slots](int i) { return slots[i]; }, count, size);
  }

  template <cpu::Isa kIsa, typename Slot>
  [[gnu::always_inline]] static void over(void* out, Slot slot, size_t count, int size) {
    if (size == 2) return Finish<kDtype, kOp>::template run<kIsa>(out, slot(0), slot(1), count, 2);
    if constexpr (HalfVector<kIsa, kDtype>::kBytes > 0)
      HalfLoop<kIsa, kDtype, kOp>::run(out, slot, count, size, size);
    else
      by_chunks<kIsa>(out, slot, count, size);
  }

 private:
  template <cpu::Isa kIsa, typename Slot>
  [[gnu::always_inline]] static void by_chunks(void* out, Slot slot, size_t count, int size) {
    Values<kDtype> sums;
    for (size_t begin = 0; begin < count; begin += sums.size()) {
      const size_t n = std::min(sums.size(), count - begin);
      Chunk<kIsa, kDtype>::read(sums.data(), slot(0), begin, n);
      for (int i = 1; i < size; ++i) add<kIsa>(sums, slot(i), begin, n);
      for (size_t j = 0; j < n; ++j) sums[j] = cpu::last<kOp>(sums[j], size);
      Chunk<kIsa, kDtype>::write(out, sums.data(), begin, n);
    }
  }

  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void add(Values<kDtype>& sums, const void* slot, size_t begin,
                                         size_t n) {
    constexpr ReduceOp kStep = cpu::kOpOf<kDtype, kOp>;
    for (size_t i = 0; i < n; ++i)
      sums[i] = cpu::combine<kStep>(sums[i], cpu::load<kDtype>(slot, begin + i));
  }
};

// The slots are contiguous.
template <Dtype kDtype, ReduceOp kOp>
struct Fold {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* slots, size_t count, int size) {
    const auto slot = [=](int i) -> const void* {
      return static_cast<const std::byte*>(slots) +
             static_cast<size_t>(i) * count * sizeof(cpu::Stored<kDtype>);
    };
    Join<kDtype, kOp>::template over<kIsa>(out, slot, count, size);
  }
};

}  // namespace pycomm::kernels
