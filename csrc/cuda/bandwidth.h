// Memory bandwidth loops on a GPU, as in kernels/bandwidth.h: an upper bound for kernels with the
// same memory traffic. The benchmarks call them, through bindings/cuda_bandwidth.cpp. Arrays are
// aligned to 16 bytes.
#pragma once

#include <cstddef>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// u[i] += grad[i]; v[i] += u[i]: reads three arrays and writes two, as a DGC step does.
void stream_step(const float* grad, float* u, float* v, size_t count, kernels::Queue queue);

// to[i] = from[i]
void stream_copy(const float* from, float* to, size_t count, kernels::Queue queue);

// Reads x. Raises `most`, a word on the device, to the bits of the largest magnitude, so that the
// compiler keeps the loads.
void stream_read(const float* x, size_t count, unsigned* most, kernels::Queue queue);

}  // namespace pycomm::cuda
