// Groups of neighbours, for the compression of updates: the tables and formulas of the calls in
// device_kernels.h.
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

#include "codec/compact.h"
#include "core/dtype.h"
#include "kernels/tables.h"

namespace pycomm::kernels {

using codec::kMostGroup;

// A row of 64-bit words from Python.
struct UpdatePiece {
  const void* theta;
  void* param;
  float* residual;
  size_t count;
};

// The k largest groups: their numbers, ascending, and their sizes.
struct LargestGroups {
  size_t group;
  size_t k;
  int32_t* indices;  // [k]
  float* sizes;      // [k]
  Workspace workspace;
};

// Writes the values of groups to float32 tensors.
struct GroupValues {
  std::span<const Array> tensors;
  size_t group;
  std::span<const int32_t> indices;  // of groups
  const float* values;  // [indices, group]; those after the end of a tensor are ignored
  Workspace workspace;
};

// The most that a call needs for these tensors.
struct GroupCounts {
  size_t tensors;
  size_t groups;
  size_t k;
};

constexpr size_t groups_in(size_t count, size_t group) { return (count + group - 1) / group; }

}  // namespace pycomm::kernels
