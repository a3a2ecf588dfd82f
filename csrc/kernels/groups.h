// Kernels of groups of neighbours, for the compression of updates; on the CPU only. The rules of
// device_kernels.h apply.
//
// The elements of each tensor form groups of B neighbours, B a power of two up to kMostGroup; the
// last group of a tensor may be shorter. Group numbers count through all tensors. The size of a
// group is its sum of squares in float32, padded to B squares with zeros, and added in pairs of
// neighbours: s[i] = s[2 i] + s[2 i + 1], until one number remains. Larger groups come first, in
// the order of magnitudes of device_kernels.h; of equal ones the lower number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/groups.h"
#include "core/dtype.h"
#include "kernels/device_kernels.h"

namespace pycomm::kernels {

inline constexpr size_t kMostGroup = 1024;

// A row of 64-bit words from Python.
struct UpdatePiece {
  const void* theta;
  void* param;
  float* residual;
  size_t count;
};

// For each element: residual += theta - param, in float32; param = theta. Then the k largest groups
// of the residual: `indices` are their numbers, `values` the residual there; the values are coded,
// and the residual there becomes the rounding error, or 0 if that is not finite.
struct UpdateStep {
  std::span<const UpdatePiece> pieces;
  Dtype dtype;  // of theta and param: float16, bfloat16 or float32
  size_t group;
  size_t k;
  codec::ValueCode value_code;
  int32_t* indices;   // [k]
  float* values;      // [k * group]
  std::byte* packet;  // most_group_bytes()
  Workspace workspace;
};
struct UpdateSizes {
  size_t values;
  size_t bytes;
};
UpdateSizes update_step(const UpdateStep& step);
size_t update_workspace_bytes(size_t groups, size_t k);

// The k largest groups of float32 tensors: their numbers, ascending, and their sizes. Allocates.
void topk_groups(std::span<const Array> tensors, size_t group, size_t k, int32_t* indices,
                 float* sizes);

// The number of elements in these groups of tensors with these counts; with `elements` not null
// also their indices, which count through all tensors. Throws InvalidArgument unless the group
// numbers ascend in their range.
size_t group_elements(std::span<const uint64_t> counts, size_t group,
                      std::span<const int32_t> indices, int32_t* elements);

// The number of groups of tensors with these counts.
size_t group_count(std::span<const uint64_t> counts, size_t group);

}  // namespace pycomm::kernels
