// Memory bandwidth loops on the CPU, with the threads of the kernels: an upper bound for kernels
// with the same memory traffic. The benchmarks call them, through bindings/core_kernels.cpp.
#pragma once

#include <cstddef>

namespace pycomm::kernels {

// u[i] += grad[i]; v[i] += u[i]: reads three arrays and writes two, as a DGC step does.
void stream_step(const float* grad, float* u, float* v, size_t count);

// to[i] = from[i], with plain or non-temporal stores.
void stream_copy(const float* from, float* to, size_t count, bool nontemporal);

// Reads x. Returns the bits of the largest magnitude, so that the compiler keeps the loads.
unsigned stream_read(const float* x, size_t count);

}  // namespace pycomm::kernels
