// Loops that only move memory on a GPU, the twins of kernels/bandwidth.h: what a kernel that does
// the same can reach at best there. Not kernels: nothing useful comes out. Called by the
// benchmarks, through bindings/cuda_bandwidth.cpp. Arrays are aligned to 16 bytes.
#pragma once

#include <cstddef>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// u[i] += grad[i]; v[i] += u[i]: reads three arrays and writes two, as a DGC step does.
void stream_step(const float* grad, float* u, float* v, size_t count, Queue queue);

// to[i] = from[i]
void stream_copy(const float* from, float* to, size_t count, Queue queue);

// Reads x. `most`, a word on the device, rises to the largest magnitude's bits, so that no compiler
// leaves the reading out.
void stream_read(const float* x, size_t count, unsigned* most, Queue queue);

}  // namespace pycomm::cuda
