// Packets of groups whose values are decoded while they are added, part by part: memory for all
// values at once, and its page faults, would cost more than the sums.
#pragma once

#include <span>

#include "kernels/device_kernels.h"

namespace pycomm::kernels {

// A row of 64-bit words from Python.
struct ReadGroups {
  DeviceKernels::CompactPacket packet;
  const int32_t* indices;  // [k], of groups of the arrays
};

// Reads the indices of the groups of all packets, in order, plus `first`. Throws InvalidArgument
// unless the bytes are such packets, of this group.
void read_group_indices(std::span<const DeviceKernels::CompactPacket> packets, size_t group,
                        int32_t* indices);

// DeviceKernels::decode_sum and decode_update of such packets, of the group of the chain. Throw
// InvalidArgument, before any change, for other packets, or indices that do not ascend among the
// groups of the arrays.
void decode_group_sum(const Chain& out, std::span<const ReadGroups> packets, double scale);
void decode_group_update(const Chain& param, std::span<const ReadGroups> packets,
                         DeviceKernels::Update update);

}  // namespace pycomm::kernels
