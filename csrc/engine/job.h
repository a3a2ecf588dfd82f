// What the tasks of a collective need to know about it.
#pragma once

#include <cstddef>
#include <span>

#include "core/operation.h"
#include "engine/schedule.h"
#include "kernels/kernels.h"
#include "transport/frame.h"

namespace pycomm::engine {

struct Job {
  transport::Header header{};  // of every frame of the call, with its epoch and sequence
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t element_bytes = 1;
  const kernels::Reducer* reducer = nullptr;
  int size = 1;  // ranks, which avg divides by

  // For a plan. Element `i` of a strided array has the index (i / piece) * stride + i % piece in
  // it. piece = 0: the arrays are contiguous.
  const Schedule* schedule = nullptr;
  size_t piece = 0, stride = 0;
  // If the header's count differs by peer (else empty): by rank the count that is sent to it, then
  // by rank the count that must be received from it.
  std::span<const size_t> peer_counts{};

  // For shared/, which has no plan; `count` as in group.h.
  Operation operation = Operation::barrier;
  size_t count = 0;
  int root = 0;        // number in the region
  bool folds = false;  // 16-bit sums: add all summands at once, round once
  // Not 0: a reduce_scatter or all_gather inside a host of which only the first `parts` ranks have
  // a part. More summands follow, so its last addition is no final one.
  int parts = 0;
};

}  // namespace pycomm::engine
