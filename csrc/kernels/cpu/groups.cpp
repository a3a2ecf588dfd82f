// The update step on the CPU: one pass over memory adds the update to the residual and computes the
// size of each group; then the selection of topk, and one pass over the selected groups.
#include "kernels/groups.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/cpu/indices.h"
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
constexpr size_t kGroupsPerTask = 1 << 12;
constexpr size_t kSerial = 1 << 17;  // fewer elements do not pay for a wake-up
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

constexpr size_t groups_in(size_t count, size_t group) { return (count + group - 1) / group; }

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

// Selects from the sizes of all groups.
void select(float* all, size_t count, size_t k, int32_t* indices, float* sizes,
            Workspace workspace) {
  cpu_kernels().topk(
      {all, count, Dtype::float32},
      {.k = k, .indices = indices, .values = sizes, .threshold = nullptr, .workspace = workspace},
      {});
}

size_t select_bytes(size_t count, size_t k) {
  return cpu_kernels().topk_workspace_bytes(count, k, Dtype::float32);
}

// Where a selected group is: in the residual and in the packet.
struct Selected {
  float* at;
  size_t count;
  size_t first;  // value
};

// Returns the number of values.
size_t locate(const UpdateStep& step, std::span<Selected> found) {
  const UpdatePiece* piece = step.pieces.data();
  size_t first_group = 0, value = 0;
  for (size_t i = 0; i < step.k; ++i) {
    const auto index = static_cast<size_t>(step.indices[i]);
    while (index - first_group >= groups_in(piece->count, step.group))
      first_group += groups_in(piece++->count, step.group);
    const size_t begin = (index - first_group) * step.group;
    found[i] = {piece->residual + begin, std::min(step.group, piece->count - begin), value};
    value += found[i].count;
  }
  return value;
}

// The parts of the workspace.
struct Scratch {
  std::span<Selected> selected;
  float* all;
  float* sizes;
  float* errors;
  Workspace select;

  Scratch(const UpdateStep& step, size_t groups) {
    BumpAllocator allocator(step.workspace.data, step.workspace.bytes);
    const size_t bytes = select_bytes(groups, step.k);
    select = {allocator.take<std::byte>(bytes), bytes};
    selected = {allocator.take<Selected>(step.k), step.k};
    all = allocator.take<float>(groups);
    sizes = allocator.take<float>(step.k);
    errors = allocator.take<float>(step.k * step.group);
  }
};

}  // namespace

UpdateSizes update_step(const UpdateStep& step) {
  const std::vector<Run> runs = runs_of(step.pieces, step.group);
  const size_t elements = elements_of(step.pieces);
  size_t count = 0;
  for (const auto& piece : step.pieces) count += groups_in(piece.count, step.group);
  const Scratch scratch(step, count);
  const cpu::Isa isa = cpu::isa_here();
  visit_float(step.dtype, [&](auto dtype) {
    if constexpr (dtype() != Dtype::float64)
      each_of(runs.size(), kRunsPerTask, elements, [&](size_t i) {
        const Run& run = runs[i];
        cpu::run_on<AccumulateRun<dtype()>>(isa, &step.pieces[run.piece], run.begin, run.count,
                                            step.group, scratch.all + run.first_group);
      });
  });
  select(scratch.all, count, step.k, step.indices, scratch.sizes, scratch.select);

  const auto groups = scratch.selected;
  const size_t values = locate(step, groups);
  each_of(groups.size(), kGroupsPerTask, values, [&](size_t i) {
    std::copy_n(groups[i].at, groups[i].count, step.values + groups[i].first);
  });
  const codec::Groups packet{.indices = {step.indices, step.k},
                             .values = {step.values, values},
                             .count = count,
                             .value_code = step.value_code};
  const size_t bytes = codec::encode_groups(
      packet, scratch.errors, step.packet,
      [&](size_t tasks, const auto& task) { each_of(tasks, 1, values, task); });
  each_of(groups.size(), kGroupsPerTask, values, [&](size_t i) {
    std::copy_n(scratch.errors + groups[i].first, groups[i].count, groups[i].at);
  });
  return {values, bytes};
}

size_t update_workspace_bytes(size_t groups, size_t group, size_t k) {
  const size_t floats = groups + k + k * group;
  return select_bytes(groups, k) + k * sizeof(Selected) + floats * sizeof(float) + 5 * 8;
}

void topk_groups(std::span<const Array> tensors, size_t group, size_t k, int32_t* indices,
                 float* sizes) {
  const std::vector<Run> runs = runs_of(tensors, group);
  size_t count = 0;
  for (const auto& tensor : tensors) count += groups_in(tensor.count, group);
  const auto all = std::make_unique_for_overwrite<float[]>(count);
  const cpu::Isa isa = cpu::isa_here();
  each_of(runs.size(), kRunsPerTask, elements_of(tensors), [&](size_t i) {
    const Run& run = runs[i];
    const auto* const x = static_cast<const float*>(tensors[run.piece].data) + run.begin;
    cpu::run_on<SizesOfRun>(isa, x, run.count, group, all.get() + run.first_group);
  });
  const size_t bytes = select_bytes(count, k);
  const auto scratch =
      std::make_unique_for_overwrite<std::max_align_t[]>(bytes / sizeof(std::max_align_t) + 1);
  select(all.get(), count, k, indices, sizes, {scratch.get(), bytes});
}

size_t group_count(std::span<const uint64_t> counts, size_t group) {
  size_t groups = 0;
  for (const size_t count : counts) groups += groups_in(count, group);
  return groups;
}

size_t group_elements(std::span<const uint64_t> counts, size_t group,
                      std::span<const int32_t> indices, int32_t* elements) {
  codec::check_indices(indices, group_count(counts, group));
  size_t piece = 0, first_group = 0, first = 0, found = 0;
  for (const int32_t number : indices) {
    const auto index = static_cast<size_t>(number);
    while (index - first_group >= groups_in(counts[piece], group)) {
      first_group += groups_in(counts[piece], group);
      first += counts[piece++];
    }
    const size_t begin = (index - first_group) * group;
    const size_t count = std::min(group, counts[piece] - begin);
    for (size_t i = 0; elements != nullptr && i < count; ++i)
      elements[found + i] = static_cast<int32_t>(first + begin + i);
    found += count;
  }
  return found;
}

}  // namespace pycomm::kernels
