// A CUDA device behind the interface of device/device.h. No CUDA header is needed to include this
// one. Called by tests/emulator/streams_test.cpp; cuda_device.cu implements it.
#pragma once

#include <memory>

#include "device/device.h"

namespace pycomm::cuda {

// Device `index` of this process. Throws Unsupported where there is no driver or no such GPU.
std::shared_ptr<Device> open_device(int index);

}  // namespace pycomm::cuda
