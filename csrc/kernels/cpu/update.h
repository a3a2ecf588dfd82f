// The element-wise part of a DGC step: applies the gradient to u and v, a chunk at a time.
// device_kernels.h has the formula. Included by step.cpp only, so that the program has one copy of
// each loop.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "cpu/arithmetic.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/select.h"

namespace pycomm::kernels {

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

// One element. fma is one instruction if the target has it; otherwise the C library computes it
// exactly.
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
  return to;
}

// Updates `count` elements from `begin` on, at most kTile, and stores the largest key of v in each
// group. 16-bit elements are first widened into a buffer.
template <Dtype kGrad, Dtype kWeight, bool kNesterov, bool kDecay>
struct UpdateRange {
  using Real = std::conditional_t<kGrad == Dtype::float64, double, float>;
  using Key = decltype(cpu::key_of(Real{}));

  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(Elements<Real> e, size_t begin, size_t count,
                                         Numbers<Real> numbers, Key* largest) {
    alignas(64) std::array<Real, kTile> grads, weights;
    const Real* const grad = reals<kIsa, kGrad>(e.grad, begin, count, grads.data());
    const Real* const weight =
        kDecay ? reals<kIsa, kWeight>(e.weight, begin, count, weights.data()) : grad;
    Real* const u = e.u + begin;
    Real* const v = e.v + begin;
    const size_t whole = count / kGroup * kGroup;
    for (size_t i = 0; i < whole; i += kGroup)
      *largest++ = group(grad + i, weight + i, u + i, v + i, kGroup, numbers);
    if (whole < count)
      *largest = group(grad + whole, weight + whole, u + whole, v + whole, count - whole, numbers);
  }

 private:
  [[gnu::always_inline]] static Key group(const Real* grad, const Real* weight, Real* u, Real* v,
                                          size_t count, Numbers<Real> numbers) {
    Key most = 0;
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      const auto to = moved<kNesterov, kDecay, Real>(grad[i], weight[i], {u[i], v[i]}, numbers);
      u[i] = to.u;
      v[i] = to.v;
      most = std::max(most, cpu::key_of(to.v));
    }
    // A NaN in u gives a NaN in v.
    if (most > cpu::key_of(std::numeric_limits<Real>::infinity())) [[unlikely]]
      most = make_one_nan(u, v, count);
    return most;
  }

  [[gnu::noinline]] static Key make_one_nan(Real* u, Real* v, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      u[i] = cpu::with_one_nan(u[i]);
      v[i] = cpu::with_one_nan(v[i]);
    }
    return cpu::key_of(std::numeric_limits<Real>::quiet_NaN());
  }

  template <cpu::Isa kIsa, Dtype kDtype>
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

}  // namespace pycomm::kernels
