// Loops that only move memory, by the threads that kernels use: what a kernel that does the same
// can reach at best on this machine. Not kernels: nothing useful comes out. Called by the
// benchmarks, through bindings/core_kernels.cpp.
#pragma once

#include <cstddef>

namespace pycomm {

// u[i] += grad[i]; v[i] += u[i]: reads three arrays and writes two, as a DGC step does.
void stream_step(const float* grad, float* u, float* v, size_t count);

// to[i] = from[i], with plain stores or with stores that go round the caches.
void stream_copy(const float* from, float* to, size_t count, bool around);

// Reads x; the largest magnitude's bits, so that no compiler leaves the reading out.
unsigned stream_read(const float* x, size_t count);

}  // namespace pycomm
