// The element-wise part of a DGC step: gradient into u and v, a chunk at a time. The formula stands
// in device_kernels.h. Included by step.cpp only: one copy of each loop in the program.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "kernels/cpu/arithmetic.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/isa.h"

namespace pycomm::cpu {

template <typename Real>
struct Numbers {
  Real momentum;
  Real decay;
  Real scale;
};

// Pointers to the same elements of one tensor; `weight` is null without decay.
template <typename Real>
struct Elements {
  const void* grad;
  const void* weight;
  Real* u;
  Real* v;
};

template <typename Real>
struct Moved {
  Real u;
  Real v;
};

// One element. fma is one instruction where the target has it and exact in the C library elsewhere.
template <bool kNesterov, bool kDecay, typename Real>
[[gnu::always_inline]] inline Moved<Real> moved(Real grad, Real weight, Moved<Real> from,
                                                Numbers<Real> n) {
  Real x = n.scale * grad;
  if constexpr (kDecay) x = std::fma(n.decay, weight, x);
  Moved<Real> to;
  if constexpr (kNesterov) {
    to.u = n.momentum * (from.u + x);
    to.v = from.v + (to.u + x);
  } else {
    to.u = std::fma(n.momentum, from.u, x);
    to.v = from.v + to.u;
  }
  return {with_one_nan(to.u), with_one_nan(to.v)};
}

// `count` elements from `begin` on. What is 16 bits wide is widened into a buffer first.
template <Dtype kGrad, Dtype kWeight, bool kNesterov, bool kDecay>
struct UpdateRange {
  using Real = std::conditional_t<kGrad == Dtype::float64, double, float>;
  static constexpr size_t kChunk = 1024;

  template <Isa kIsa>
  [[gnu::always_inline]] static void run(Elements<Real> e, size_t begin, size_t count,
                                         Numbers<Real> numbers) {
    alignas(64) std::array<Real, kChunk> grads, weights;
    for (size_t i = begin; i < begin + count; i += kChunk) {
      const size_t n = std::min(kChunk, begin + count - i);
      const Real* grad = reals<kIsa, kGrad>(e.grad, i, n, grads.data());
      const Real* weight = kDecay ? reals<kIsa, kWeight>(e.weight, i, n, weights.data()) : nullptr;
      Real* const u = e.u + i;
      Real* const v = e.v + i;
#pragma GCC ivdep
      for (size_t j = 0; j < n; ++j) {
        const auto to = moved<kNesterov, kDecay, Real>(grad[j], kDecay ? weight[j] : Real{0},
                                                       {u[j], v[j]}, numbers);
        u[j] = to.u;
        v[j] = to.v;
      }
    }
  }

 private:
  template <Isa kIsa, Dtype kDtype>
  [[gnu::always_inline]] static const Real* reals(const void* from, size_t begin, size_t count,
                                                  Real* buffer) {
    if constexpr (!is_half(kDtype)) {
      return static_cast<const Real*>(from) + begin;
    } else {
      Chunk<kIsa, kDtype>::read(buffer, from, begin, count);
      return buffer;
    }
  }
};

}  // namespace pycomm::cpu
