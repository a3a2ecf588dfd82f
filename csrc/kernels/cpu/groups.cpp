// The update step on the CPU: one pass over memory adds the update to the residual and computes the
// size of each group; then topk selects.
#include "kernels/groups.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "codec/cpu/indices.h"
#include "core/errors.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/select.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kRun = 1024;         // elements in the L1 cache; a multiple of every group
constexpr size_t kRunsPerTask = 128;  // of a thread
constexpr size_t kSerial = 1 << 17;   // fewer elements do not pay for a wake-up
static_assert(kRun % kMostGroup == 0);

// Sums of the squares of each group. `squares` has whole groups.
struct GroupSums {
  alignas(64) std::array<float, kRun> squares, half;

  [[gnu::always_inline]] void reduce(size_t count, size_t group, float* sizes) {
    float* from = squares.data();
    float* to = half.data();
    for (size_t left = group; left > 1; left /= 2) {
      count /= 2;
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
      std::swap(from, to);
    }
    std::copy_n(from, count, sizes);
  }
};

// Squares of a run of the residual, padded to whole groups; returns their number.
[[gnu::always_inline]] inline size_t padded(float* squares, size_t count, size_t group) {
  const size_t whole = (count + group - 1) / group * group;
  std::fill(squares + count, squares + whole, 0.0f);
  return whole;
}

struct SizesOfRun {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* x, size_t count, size_t group, float* sizes) {
    GroupSums sums;
    for (size_t i = 0; i < count; ++i) sums.squares[i] = x[i] * x[i];
    sums.reduce(padded(sums.squares.data(), count, group), group, sizes);
  }
};

// Adds the update of a run to the residual, and restores the parameters.
template <Dtype kDtype>
struct AccumulateRun {
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static void run(const UpdatePiece* piece, size_t begin, size_t count,
                                         size_t group, float* sizes) {
    GroupSums sums;
    alignas(64) std::array<float, kRun> wide_theta, wide_param;
    const float* const theta = floats<kIsa>(piece->theta, begin, count, wide_theta.data());
    const float* const param = floats<kIsa>(piece->param, begin, count, wide_param.data());
    float* const residual = piece->residual + begin;
    float* const squares = sums.squares.data();
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      const float sum = cpu::with_one_nan(residual[i] + (theta[i] - param[i]));
      residual[i] = sum;
      squares[i] = sum * sum;
    }
    constexpr size_t kBytes = sizeof(cpu::Stored<kDtype>);
    std::memcpy(static_cast<std::byte*>(piece->param) + begin * kBytes,
                static_cast<const std::byte*>(piece->theta) + begin * kBytes, count * kBytes);
    sums.reduce(padded(squares, count, group), group, sizes);
  }

 private:
  template <cpu::Isa kIsa>
  [[gnu::always_inline]] static const float* floats(const void* from, size_t begin, size_t count,
                                                    float* buffer) {
    if constexpr (kDtype == Dtype::float32) {
      return static_cast<const float*>(from) + begin;
    } else {
      Chunk<kIsa, kDtype>::read(buffer, from, begin, count);
      return buffer;
    }
  }
};

// Runs of at most kRun elements of one tensor.
struct Run {
  size_t piece;
  size_t begin;
  size_t count;
  size_t first_group;
};

template <typename Piece>
std::vector<Run> runs_of(std::span<const Piece> pieces, size_t group) {
  std::vector<Run> runs;
  size_t first = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const size_t count = pieces[p].count;
    for (size_t begin = 0; begin < count; begin += kRun)
      runs.push_back({p, begin, std::min(kRun, count - begin), first + begin / group});
    first += groups_in(count, group);
  }
  return runs;
}

// Calls f(i) for each i below `count`, on several threads if `elements` pay for them.
template <typename F>
void each_of(size_t count, size_t per_task, size_t elements, F&& f) {
  const size_t tasks = elements < kSerial ? 1 : (count + per_task - 1) / per_task;
  const auto task = [&](size_t t) {
    const cpu::ExactFloats exact;
    const size_t end = t + 1 == tasks ? count : (t + 1) * per_task;
    for (size_t i = t * per_task; i < end; ++i) f(i);
  };
  if (tasks == 1)
    task(0);
  else
    parallel(tasks, task);
}

template <typename Piece>
size_t elements_of(std::span<const Piece> pieces) {
  size_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count;
}

template <typename Piece>
size_t groups_of_all(std::span<const Piece> pieces, size_t group) {
  size_t count = 0;
  for (const auto& piece : pieces) count += groups_in(piece.count, group);
  return count;
}

size_t select_bytes(size_t count, size_t k) {
  return cpu_kernels().topk_workspace_bytes(count, k, Dtype::float32);
}

// Calls pass(run, sizes) for each run, on several threads; it writes the sizes of the run's groups.
// Then selects the largest.
template <typename Piece, typename F>
void select_groups(std::span<const Piece> pieces, const LargestGroups& largest, F&& pass) {
  const std::vector<Run> runs = runs_of(pieces, largest.group);
  const size_t count = groups_of_all(pieces, largest.group);
  BumpAllocator allocator(largest.workspace.data, largest.workspace.bytes);
  const size_t bytes = select_bytes(count, largest.k);
  const Workspace scratch{allocator.take<std::byte>(bytes), bytes};
  float* const sizes = allocator.take<float>(count);
  each_of(runs.size(), kRunsPerTask, elements_of(pieces),
          [&](size_t i) { pass(runs[i], sizes + runs[i].first_group); });
  const DeviceKernels::TopK what{.k = largest.k,
                                 .indices = largest.indices,
                                 .values = largest.sizes,
                                 .threshold = nullptr,
                                 .workspace = scratch};
  cpu_kernels().topk({sizes, count, Dtype::float32}, what, {});
}

}  // namespace

void CpuGroupKernels::update_step(std::span<const UpdatePiece> pieces, Dtype dtype,
                                  const LargestGroups& largest, Queue) {
  const cpu::Isa isa = cpu::isa_here();
  visit_float(dtype, [&](auto kind) {
    if constexpr (kind() != Dtype::float64)
      select_groups(pieces, largest, [&](const Run& run, float* to) {
        cpu::run_on<AccumulateRun<kind()>>(isa, &pieces[run.piece], run.begin, run.count,
                                           largest.group, to);
      });
  });
}

void CpuGroupKernels::topk_groups(std::span<const Array> tensors, const LargestGroups& largest,
                                  Queue) {
  const cpu::Isa isa = cpu::isa_here();
  select_groups(tensors, largest, [&](const Run& run, float* to) {
    const auto* const x = static_cast<const float*>(tensors[run.piece].data) + run.begin;
    cpu::run_on<SizesOfRun>(isa, x, run.count, largest.group, to);
  });
}

void CpuGroupKernels::write_groups(const GroupValues& values, Queue) {
  codec::check_indices(values.indices, groups_of_all(values.tensors, values.group));
  size_t tensor = 0, first_group = 0;
  const float* from = values.values;
  for (const int32_t index : values.indices) {
    while (index - first_group >= groups_in(values.tensors[tensor].count, values.group))
      first_group += groups_in(values.tensors[tensor++].count, values.group);
    const size_t begin = (index - first_group) * values.group;
    const size_t n = std::min(values.group, values.tensors[tensor].count - begin);
    std::copy_n(from, n, static_cast<float*>(values.tensors[tensor].data) + begin);
    from += values.group;
  }
}

size_t CpuGroupKernels::group_workspace_bytes(const GroupCounts& most) {
  return select_bytes(most.groups, most.k) + most.groups * sizeof(float) + 2 * 8;
}

}  // namespace pycomm::kernels
