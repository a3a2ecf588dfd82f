// Options of a device group, and what a rank needs to form one.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"
#include "nccl/nccl.h"

namespace pycomm::device_group {

// How device arrays are sent. The values of rank 0 apply to all ranks.
struct DeviceOptions {
  int channels = 1;                // channels for large arrays, 1 to 255
  bool nccl_between_hosts = true;  // false: TCP through host memory
  bool agree_after = false;        // enqueue repeated calls before the ranks agree about them
};

// What one rank needs to form a device group.
struct DeviceResources {
  std::shared_ptr<device::Device> device;
  std::shared_ptr<nccl::NcclApi> nccl;  // null if not found
  std::string why_no_nccl{};            // if null
  bool nccl_shares = false;             // NCCL on this rank lets ranks share a device
  std::string nccl_host_id{};           // NCCL's name of this host; empty: its own
  DeviceOptions options{};
};

}  // namespace pycomm::device_group
