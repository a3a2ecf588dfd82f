// All-reduce over symmetric memory on a CUDA device.
#pragma once

#include <memory>

#include "device/symmetric.h"

namespace pycomm::cuda {

std::shared_ptr<device::SymmetricDevice> open_symmetric_device(int index);

// As load_reductions() of reduce.hpp.
void load_symmetric(int device);

}  // namespace pycomm::cuda
