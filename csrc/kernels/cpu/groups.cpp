// The update step on the CPU: one pass over memory adds the update to the residual and computes the
// size of each group; then topk selects, and one pass codes the selected groups.
#include "kernels/groups.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "codec/cpu/indices.h"
#include "codec/groups.h"
#include "core/errors.h"
#include "core/visit_float.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/chunk.h"
#include "kernels/cpu/group_elements.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/select.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

constexpr size_t kRun = 1024;         // elements in the L1 cache; a multiple of every group
constexpr size_t kRunsPerTask = 128;  // of a thread
constexpr size_t kPrefetch = 48;      // selected groups
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
// Then selects the k largest of `sizes`, which are those of all groups.
template <typename F>
void select_groups(std::span<const Run> runs, size_t elements, std::span<float> sizes,
                   const DeviceKernels::TopK& what, F&& pass) {
  each_of(runs.size(), kRunsPerTask, elements,
          [&](size_t i) { pass(runs[i], sizes.data() + runs[i].first_group); });
  cpu_kernels().topk({sizes.data(), sizes.size(), Dtype::float32}, what, {});
}

template <typename To, typename From>
[[gnu::always_inline]] inline void copy_group(To* to, const From* from, size_t count) {
  constexpr size_t kUsual = 16;  // a copy of constant size is a few instructions
  for (; count >= kUsual; count -= kUsual, to += kUsual, from += kUsual)
    std::memcpy(to, from, kUsual * sizeof(float));
  std::memcpy(to, from, count * sizeof(float));
}

// The values of the selected groups, in the residual.
class SelectedValues final : public codec::GroupValues {
 public:
  explicit SelectedValues(const UpdateStep& step) : step_(step), indices_(step.indices, step.k) {
    size_t selected = 0, value = 0, first_group = 0;
    for (const UpdatePiece& piece : step.pieces) {
      const size_t groups = groups_in(piece.count, step.group);
      const auto end = static_cast<size_t>(
          std::lower_bound(indices_.begin(), indices_.end(), first_group + groups,
                           [](int32_t a, size_t b) { return static_cast<size_t>(a) < b; }) -
          indices_.begin());
      if (end > selected) {
        tensors_.push_back({&piece, first_group, selected, end, value});
        const size_t last = static_cast<size_t>(indices_[end - 1]) - first_group;
        value += (end - selected - 1) * step.group +
                 std::min(step.group, piece.count - last * step.group);
      }
      selected = end;
      first_group += groups;
    }
    count_ = value;
  }

  size_t count() const { return count_; }

  void read(size_t first, std::span<float> values) const override {
    each(first, values.size(),
         [&](const float* at, size_t i, size_t n) { copy_group(values.data() + i, at, n); });
    std::copy(values.begin(), values.end(), step_.values + first);
  }

  void write_errors(size_t first, std::span<const float> errors) const override {
    each(first, errors.size(),
         [&](float* at, size_t i, size_t n) { copy_group(at, errors.data() + i, n); });
  }

 private:
  // A tensor with selected groups.
  struct Tensor {
    const UpdatePiece* piece;
    size_t first_group;
    size_t begin, end;  // its part of the selection
    size_t value;       // its first one
  };

  // Calls f(address, i, n) for n neighbours in the residual, the values from first + i on.
  template <typename F>
  [[gnu::always_inline]] void each(size_t first, size_t count, F&& f) const {
    const Tensor* tensor =
        &*std::upper_bound(tensors_.begin(), tensors_.end(), first,
                           [](size_t a, const Tensor& b) { return a < b.value; }) -
        1;
    size_t at = tensor->begin + (first - tensor->value) / step_.group;
    size_t skipped = (first - tensor->value) % step_.group;
    for (size_t i = 0; i < count; ++at) {
      if (at == tensor->end) ++tensor;
      const size_t begin = begin_of(*tensor, at);
      if (at + kPrefetch < tensor->end) {
        const float* const ahead = tensor->piece->residual + begin_of(*tensor, at + kPrefetch);
        __builtin_prefetch(ahead, 1);
        __builtin_prefetch(ahead + step_.group - 1, 1);  // often in the next cache line
      }
      const size_t size = std::min(step_.group, tensor->piece->count - begin);
      const size_t n = std::min(size - skipped, count - i);
      f(tensor->piece->residual + begin + skipped, i, n);
      i += n;
      skipped = 0;
    }
  }

  size_t begin_of(const Tensor& tensor, size_t at) const {
    return (static_cast<size_t>(indices_[at]) - tensor.first_group) * step_.group;
  }

  const UpdateStep& step_;
  std::span<const int32_t> indices_;
  std::vector<Tensor> tensors_;
  size_t count_;
};

void decode_packet(const GroupPacket& packet, const GroupElements& all, int32_t* elements,
                   float* values) {
  const codec::GroupReader reader = reader_of(packet, all);
  std::vector<int32_t> indices(packet.k);
  codec::decode_groups(reader, indices.data(), values, [&](size_t tasks, const auto& task) {
    each_of(tasks, 1, packet.values, task);
  });
  const auto part = [&](size_t task) {
    const size_t begin = task * kGroupsPerTask;
    return std::span(indices).subspan(begin, std::min(kGroupsPerTask, indices.size() - begin));
  };
  const size_t parts = (indices.size() + kGroupsPerTask - 1) / kGroupsPerTask;
  std::vector<size_t> first(parts + 1);  // element of each part, and their number
  each_of(parts, 1, packet.values, [&](size_t i) { first[i + 1] = all.of(part(i), nullptr); });
  std::partial_sum(first.begin(), first.end(), first.begin());
  check_values(packet, first.back());
  each_of(parts, 1, packet.values, [&](size_t i) { all.of(part(i), elements + first[i]); });
}

}  // namespace

void CpuGroupKernels::update_step(const UpdateStep& step, Queue) {
  const std::vector<Run> runs = runs_of(step.pieces, step.group);
  const size_t count = groups_of_all(step.pieces, step.group);
  BumpAllocator allocator(step.workspace.data, step.workspace.bytes);
  const size_t bytes = select_bytes(count, step.k);
  const Workspace scratch{allocator.take<std::byte>(bytes), bytes};
  const std::span sizes(allocator.take<float>(count), count);
  const DeviceKernels::TopK largest{.k = step.k,
                                    .indices = step.indices,
                                    .values = allocator.take<float>(step.k),
                                    .threshold = nullptr,
                                    .workspace = scratch};
  const cpu::Isa isa = cpu::isa_here();
  visit_float(step.dtype, [&](auto dtype) {
    if constexpr (dtype() != Dtype::float64)
      select_groups(runs, elements_of(step.pieces), sizes, largest, [&](const Run& run, float* to) {
        cpu::run_on<AccumulateRun<dtype()>>(isa, &step.pieces[run.piece], run.begin, run.count,
                                            step.group, to);
      });
  });

  const SelectedValues values(step);
  const codec::Groups packet{.indices = {step.indices, step.k},
                             .count = count,
                             .values = values.count(),
                             .value_code = step.value_code};
  const auto run_tasks = [&](size_t tasks, const auto& task) {
    each_of(tasks, 1, values.count(), task);
  };
  step.sizes[0] = values.count();
  step.sizes[1] = codec::encode_groups(packet, values, step.packet, run_tasks);
}

void CpuGroupKernels::topk_groups(const GroupSelection& selection, Queue) {
  const auto& [tensors, group, k, indices, sizes, workspace] = selection;
  const std::vector<Run> runs = runs_of(tensors, group);
  const size_t count = groups_of_all(tensors, group), bytes = select_bytes(count, k);
  BumpAllocator allocator(workspace.data, workspace.bytes);
  const Workspace scratch{allocator.take<std::byte>(bytes), bytes};
  const std::span of_groups(allocator.take<float>(count), count);
  const DeviceKernels::TopK largest{
      .k = k, .indices = indices, .values = sizes, .threshold = nullptr, .workspace = scratch};
  const cpu::Isa isa = cpu::isa_here();
  select_groups(runs, elements_of(tensors), of_groups, largest, [&](const Run& run, float* to) {
    const auto* const x = static_cast<const float*>(tensors[run.piece].data) + run.begin;
    cpu::run_on<SizesOfRun>(isa, x, run.count, group, to);
  });
}

void CpuGroupKernels::write_groups(const GroupValues& values, Queue) {
  std::vector<uint64_t> counts;
  for (const Array& tensor : values.tensors) counts.push_back(tensor.count);
  const GroupElements elements(counts, values.group);
  codec::check_indices(values.indices, elements.groups());
  const size_t count = elements.of(values.indices, nullptr);
  if (count != values.values.size())
    throw InvalidArgument("invalid values: got " + std::to_string(values.values.size()) +
                          " elements, expected " + std::to_string(count) + ", those of the groups");
  size_t tensor = 0, first_group = 0;
  const float* from = values.values.data();
  for (const int32_t index : values.indices) {
    while (index - first_group >= groups_in(counts[tensor], values.group))
      first_group += groups_in(counts[tensor++], values.group);
    const size_t begin = (index - first_group) * values.group;
    const size_t n = std::min(values.group, counts[tensor] - begin);
    std::copy_n(from, n, static_cast<float*>(values.tensors[tensor].data) + begin);
    from += n;
  }
}

size_t CpuGroupKernels::group_workspace_bytes(const GroupCounts& most) {
  return select_bytes(most.groups, most.k) + (most.groups + most.k) * sizeof(float) + 3 * 8;
}

void CpuGroupKernels::decode_groups(const GroupDecoding& decoding, Queue) {
  const GroupElements all(decoding.counts, decoding.group);
  size_t first = 0;
  for (const GroupPacket& packet : decoding.packets) {
    decode_packet(packet, all, decoding.elements + first, decoding.values + first);
    first += packet.values;
  }
  std::fill_n(decoding.refused, decoding.packets.size(), 0);
}

size_t CpuGroupKernels::group_decoding_bytes(const GroupDecoding&) { return 0; }

}  // namespace pycomm::kernels
