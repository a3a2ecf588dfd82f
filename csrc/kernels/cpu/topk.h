// topk of float32 numbers whose leading digits were counted when they were computed.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cpu/select.h"
#include "kernels/device_kernels.h"

namespace pycomm::kernels {

// Whether topk() reads the histogram.
bool reads_leading(size_t count, size_t k);

// The topk of device_kernels.h. `leading` is the histogram of key >> kFirstShift<uint32_t> over all
// keys, or null.
void topk(std::span<const float> x, const DeviceKernels::TopK& what, const Histogram* leading);

}  // namespace pycomm::kernels
