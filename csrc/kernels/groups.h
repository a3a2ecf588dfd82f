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

#include "codec/groups.h"
#include "core/dtype.h"
#include "kernels/tables.h"

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
  uint64_t* sizes;    // [2], on the device: the number of values, and the bytes of the packet
  Workspace workspace;
};

// The k largest groups of float32 tensors: their numbers, ascending, and their sizes.
struct GroupSelection {
  std::span<const Array> tensors;
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
  std::span<const float> values;
  Workspace workspace;
};

// A packet of groups, with the numbers of its header. A row of 64-bit words from Python.
struct GroupPacket {
  const std::byte* bytes;
  size_t size;
  size_t k;
  size_t values;
};

// Decodes packets of groups of tensors with these counts, from arbitrary bytes.
struct GroupDecoding {
  std::span<const uint64_t> counts;  // elements of each tensor
  size_t group;
  std::span<const GroupPacket> packets;
  int32_t* elements = nullptr;  // of all packets, in order: indices that count through all tensors
  float* values = nullptr;      // likewise
  uint32_t* refused = nullptr;  // [packets], on the device
  Workspace workspace{};
};

// The most that a call needs for these tensors.
struct GroupCounts {
  size_t tensors;
  size_t groups;
  size_t k;
};

constexpr size_t groups_in(size_t count, size_t group) { return (count + group - 1) / group; }

}  // namespace pycomm::kernels
