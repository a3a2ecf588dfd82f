// The loops over elements, and the instruction set that each is compiled for. Included by
// reduce.cpp only: one copy of each loop in the program.
//
// A loop is written once, without a target, and always inlined; On<isa>::run is an ordinary
// function with a target, into which it is inlined and vectorised anew. So no file needs flags of
// its own, no inline function escapes into a program that may run elsewhere, and the choice is an
// ordinary pointer: an ifunc (target_clones) would be resolved before the sanitizers have started.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/reduce.h"

namespace pycomm::cpu {

template <Isa>
struct On;

template <>
struct On<Isa::baseline> {
  template <typename Loop, typename... Args>
  static void run(Args... args) {
    Loop::template run<Isa::baseline>(args...);
  }
};

#ifdef __x86_64__
template <>
struct On<Isa::avx2> {
  template <typename Loop, typename... Args>
  [[gnu::target("avx2,f16c")]] static void run(Args... args) {
    Loop::template run<Isa::avx2>(args...);
  }
};
#endif

// Values of one chunk: 4 KiB, so that two of them and what they came from stay in the first cache.
template <Dtype kDtype>
using Values = std::array<Value<kDtype>, 4096 / sizeof(Value<kDtype>)>;

template <Dtype kDtype, ReduceOp kOp>
struct Finish {
  template <Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* a, const void* b, size_t count,
                                         int size) {
    if constexpr (Chunk<kIsa, kDtype>::kHasInstruction) {
      by_chunks<kIsa>(out, a, b, count, size);
    } else {
      // `ivdep`: out may be a or b, element for element; that is no reason to go one by one.
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i)
        store<kDtype>(out, i, one(load<kDtype>(a, i), load<kDtype>(b, i), size));
    }
  }

 private:
  [[gnu::always_inline]] static Value<kDtype> one(Value<kDtype> a, Value<kDtype> b, int size) {
    return last<kOp>(combine<kOpOf<kDtype, kOp>>(a, b), size);
  }

  template <Isa kIsa>
  [[gnu::always_inline]] static void by_chunks(void* out, const void* a, const void* b,
                                               size_t count, int size) {
    Values<kDtype> left, right;
    for (size_t begin = 0; begin < count; begin += left.size()) {
      const size_t n = std::min(left.size(), count - begin);
      Chunk<kIsa, kDtype>::read(left.data(), a, begin, n);
      Chunk<kIsa, kDtype>::read(right.data(), b, begin, n);
      for (size_t i = 0; i < n; ++i) left[i] = one(left[i], right[i], size);
      Chunk<kIsa, kDtype>::write(out, left.data(), begin, n);
    }
  }
};

template <Dtype kDtype, ReduceOp kOp>
struct Reduce {
  template <Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* a, const void* b, size_t count) {
    constexpr ReduceOp kUnfinished = kOp == ReduceOp::avg ? ReduceOp::sum : kOp;
    Finish<kDtype, kUnfinished>::template run<kIsa>(out, a, b, count, 1);
  }
};

// Two slots are a finish. More go chunk by chunk: all slots of a chunk are read before `out` is
// written, so that `out` may be any of them.
template <Dtype kDtype, ReduceOp kOp>
struct Fold {
  template <Isa kIsa>
  [[gnu::always_inline]] static void run(void* out, const void* slots, size_t count, int size) {
    const auto slot = [&](int i) {
      return static_cast<const std::byte*>(slots) +
             static_cast<size_t>(i) * count * sizeof(Stored<kDtype>);
    };
    if (size == 2) return Finish<kDtype, kOp>::template run<kIsa>(out, slots, slot(1), count, size);
    Values<kDtype> sums;
    for (size_t begin = 0; begin < count; begin += sums.size()) {
      const size_t n = std::min(sums.size(), count - begin);
      Chunk<kIsa, kDtype>::read(sums.data(), slots, begin, n);
      for (int i = 1; i < size; ++i) add<kIsa>(sums, slot(i), begin, n);
      for (size_t j = 0; j < n; ++j) sums[j] = last<kOp>(sums[j], size);
      Chunk<kIsa, kDtype>::write(out, sums.data(), begin, n);
    }
  }

 private:
  template <Isa kIsa>
  [[gnu::always_inline]] static void add(Values<kDtype>& sums, const void* slot, size_t begin,
                                         size_t n) {
    constexpr ReduceOp kStep = kOpOf<kDtype, kOp>;
    if constexpr (Chunk<kIsa, kDtype>::kHasInstruction) {
      Values<kDtype> next;
      Chunk<kIsa, kDtype>::read(next.data(), slot, begin, n);
      for (size_t i = 0; i < n; ++i) sums[i] = combine<kStep>(sums[i], next[i]);
    } else {
      for (size_t i = 0; i < n; ++i)
        sums[i] = combine<kStep>(sums[i], load<kDtype>(slot, begin + i));
    }
  }
};

}  // namespace pycomm::cpu
