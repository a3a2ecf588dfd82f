// Kernels over whole arrays on the CPU: norms, clipping, casts, reductions. device_kernels.h has
// the formulas.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/threads.h"
#include "kernels/kernels.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kTile = 4096, kLanes = 128;
constexpr size_t kRange = 16 * kTile;  // elements per task of a thread

// The sum of one tile, squared or not, in the order of device_kernels.h.
template <Dtype kDtype, bool kSquare>
struct TileSum {
  template <cpu::Isa>
  [[gnu::always_inline]] static double run(const void* from, size_t begin, size_t count) {
    alignas(64) std::array<double, kLanes> lanes{};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (size_t j = 0; j < kLanes; ++j) add(lanes[j], cpu::load<kDtype>(from, begin + i + j));
    for (size_t j = 0; i + j < count; ++j) add(lanes[j], cpu::load<kDtype>(from, begin + i + j));
    for (size_t width = kLanes / 2; width > 0; width /= 2)
      for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    return lanes[0];
  }

 private:
  [[gnu::always_inline]] static void add(double& lane, double x) {
    lane = kSquare ? std::fma(x, x, lane) : lane + x;
  }
};

constexpr size_t tiles_of(size_t count) { return (count + kTile - 1) / kTile; }

template <Dtype kDtype>
double norm_of(const Array& array, double* sums) {
  size_t left = tiles_of(array.count);
  if (left == 0) return 0;
  const cpu::Isa isa = cpu::isa_here();
  parallel((left + 15) / 16, [&](size_t task) {
    const cpu::ExactFloats exact;
    for (size_t tile = 16 * task; tile < std::min(left, 16 * task + 16); ++tile)
      sums[tile] = cpu::run_on<TileSum<kDtype, true>, const void*>(
          isa, array.data, tile * kTile, std::min(kTile, array.count - tile * kTile));
  });
  const cpu::ExactFloats exact;
  for (; left > 1; left = tiles_of(left))
    for (size_t tile = 0; tile < tiles_of(left); ++tile)
      sums[tile] = cpu::run_on<TileSum<Dtype::float64, false>, const void*>(
          isa, sums, tile * kTile, std::min(kTile, left - tile * kTile));
  return std::sqrt(sums[0]);
}

template <Dtype kDtype>
struct Multiply {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(void* x, size_t count, cpu::Value<kDtype> factor) {
    std::array<cpu::Value<kDtype>, 1024> values;
    for (size_t begin = 0; begin < count; begin += values.size()) {
      const size_t n = std::min(values.size(), count - begin);
      Chunk<kIsa, kDtype>::read(values.data(), x, begin, n);
      for (size_t i = 0; i < n; ++i) values[i] *= factor;
      Chunk<kIsa, kDtype>::write(x, values.data(), begin, n);
    }
  }
};

template <Dtype kFrom, Dtype kTo>
struct Cast {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(const void* from, void* to, size_t count) {
    std::array<cpu::Value<kFrom>, 1024> values;
    for (size_t begin = 0; begin < count; begin += values.size()) {
      const size_t n = std::min(values.size(), count - begin);
      Chunk<kIsa, kFrom>::read(values.data(), from, begin, n);
      if constexpr (std::is_same_v<cpu::Value<kFrom>, cpu::Value<kTo>>)
        Chunk<kIsa, kTo>::write(to, values.data(), begin, n);
      else
        for (size_t i = 0; i < n; ++i) cpu::store_rounded<kTo>(to, begin + i, values[i]);
    }
  }
};

// Calls f(begin, count) for ranges of an array, on several threads.
template <typename F>
void by_ranges(size_t count, F&& f) {
  parallel((count + kRange - 1) / kRange, [&](size_t range) {
    const cpu::ExactFloats exact;
    f(range * kRange, std::min(kRange, count - range * kRange));
  });
}

std::byte* element(void* array, size_t i, Dtype dtype) {
  return static_cast<std::byte*>(array) + i * bytes_of(dtype);
}

}  // namespace

void CpuKernels::norm(std::span<const Array> arrays, Dtype dtype, double* norms,
                      Workspace workspace, Queue) {
  auto* const sums = static_cast<double*>(workspace.data);
  visit_float(dtype, [&](auto constant) {
    for (const Array& array : arrays) *norms++ = norm_of<constant()>(array, sums);
  });
}

size_t CpuKernels::norm_workspace_bytes(std::span<const Array> arrays) {
  size_t most = 0;
  for (const Array& array : arrays) most = std::max(most, tiles_of(array.count));
  return most * sizeof(double);
}

void CpuKernels::clip_scale(const double* norms, TypedArray factors, Clip clip, Queue) {
  const cpu::ExactFloats exact;
  visit_real(factors.dtype, [&](auto dtype) {
    using Real = cpu::Stored<dtype()>;
    for (size_t i = 0; i < factors.count; ++i) {
      const double ratio = norms[i] > 0 && cpu::is_finite(norms[i]) ? clip.limit / norms[i] : 1;
      static_cast<Real*>(factors.data)[i] = static_cast<Real>(clip.scale * std::min(ratio, 1.0));
    }
  });
}

void CpuKernels::multiply(TypedArray x, const void* factor, Queue) {
  visit_float(x.dtype, [&](auto dtype) {
    using Real = cpu::Value<dtype()>;
    const Real number = *static_cast<const Real*>(factor);
    if (number == 1) return;
    by_ranges(x.count, [&](size_t begin, size_t count) {
      cpu::run_on<Multiply<dtype()>, void*>(cpu::isa_here(), element(x.data, begin, x.dtype), count,
                                            number);
    });
  });
}

void CpuKernels::cast(TypedArray x, TypedArray out, Queue) {
  visit_float(x.dtype, [&](auto from) {
    visit_float(out.dtype, [&](auto to) {
      by_ranges(x.count, [&](size_t begin, size_t count) {
        cpu::run_on<Cast<from(), to()>, const void*, void*>(
            cpu::isa_here(), element(x.data, begin, x.dtype), element(out.data, begin, out.dtype),
            count);
      });
    });
  });
}

void CpuKernels::reduce(TypedArray out, std::span<const void* const> xs, ReduceOp op, Queue) {
  const Reducer& found = reducer(out.dtype, op);
  by_ranges(out.count, [&](size_t begin, size_t count) {
    std::vector<const void*> shifted(xs.begin(), xs.end());
    for (const void*& x : shifted)
      x = static_cast<const std::byte*>(x) + begin * bytes_of(out.dtype);
    found.join(element(out.data, begin, out.dtype), shifted.data(), count,
               static_cast<int>(xs.size()));
  });
}

DeviceKernels& cpu_kernels() {
  static CpuKernels kernels;
  return kernels;
}

}  // namespace pycomm::kernels
