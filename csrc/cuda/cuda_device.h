// The CUDA implementation of device/device.h. This header needs no CUDA header.
#pragma once

#include <memory>

#include "device/device.h"

namespace pycomm::cuda {

// Device `index` of this process. Throws Unsupported without a driver or such a GPU.
std::shared_ptr<device::Device> open_device(int index);

}  // namespace pycomm::cuda
