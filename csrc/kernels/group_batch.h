// Packets of groups whose values are decoded while they are added, part by part: memory for all
// values at once, and its page faults, would cost more than the sums.
#pragma once

#include <span>

#include "kernels/device_kernels.h"
#include "kernels/groups.h"

namespace pycomm::kernels {

// A row of 64-bit words from Python.
struct ReadGroups {
  GroupPacket packet;
  const int32_t* indices;  // [k], of groups
};

// Reads the indices of the groups of all packets, in order, to decoding.elements. Throws
// InvalidArgument unless the bytes are packets of these groups.
void read_group_indices(const GroupDecoding& decoding);

// DeviceKernels::decode_sum and decode_update of such packets. Throw InvalidArgument, before any
// change, for packets or indices of other groups than those of the arrays.
void decode_group_sum(const Chain& out, std::span<const ReadGroups> packets, size_t group,
                      double scale);
void decode_group_update(const Chain& param, std::span<const ReadGroups> packets, size_t group,
                         DeviceKernels::Update update);

}  // namespace pycomm::kernels
