// The table of tensors whose elements form groups, and the launches that move the values of
// selected groups. Host code only.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cuda/compact_tables.cuh"
#include "kernels/device_kernels.h"

namespace pycomm::cuda {

struct GroupPiece {
  const void* theta;
  void* param;
  float* residual;
  unsigned count;
  unsigned first_group, first_run;
  bool aligned;  // to four elements, all of them
};

// Arguments of every launch.
struct GroupTables {
  GroupPiece* pieces;
  float* sizes;  // [groups]
  unsigned piece_count, runs, groups;
  unsigned bits;  // a group has 2^bits elements
};

// The tables, and the rows of `pieces`, which its caller places in the workspace.
struct GroupPlan {
  std::vector<GroupPiece> pieces;
  GroupTables tables{};
};
GroupPlan plan_of(std::span<const kernels::Array> tensors, size_t group);
void store_table(const GroupPlan& plan, cudaStream_t stream);

// values = the selected groups of the tensors, 0 after the end of a tensor.
void take_values(const GroupTables& tables, std::span<const Writing> rows, cudaStream_t stream);
// Opposite: the groups become the errors, or 0 where these are not finite. A row with wrong indices
// changes nothing.
void leave_errors(const GroupTables& tables, std::span<const Writing> rows, cudaStream_t stream);

}  // namespace pycomm::cuda
