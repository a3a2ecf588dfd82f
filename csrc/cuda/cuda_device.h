// The CUDA implementation of device/device.h. This header needs no CUDA header.
#pragma once

#include <functional>
#include <memory>

#include "device/device.h"

namespace pycomm::cuda {

// Device `index` of this process. Throws Unsupported without a driver or such a GPU. `empty_caches`
// frees the unused device memory that other libraries keep; called where none is left.
std::shared_ptr<device::Device> open_device(int index, std::function<void()> empty_caches = {});

}  // namespace pycomm::cuda
