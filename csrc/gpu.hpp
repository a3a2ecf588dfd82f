// Portability layer: everything that kernels spell differently under nvcc and under the emulator.
//
// Under nvcc each of these is one instruction or a plain language feature. Elsewhere
// tests/emulator/emulator.hpp replaces them: it runs a kernel on the CPU with one fiber per CUDA
// thread and counts the bytes that load() and store() move. This file has no kernel and no policy.
// Included by csrc/cuda/*.cu and *.cuh alone.
//
// Rules for kernels: shared memory, launches, and accesses of hot loops go through gpu::; masks are
// full or computed; flags are load_acquire and store_release, never volatile; loops that hold warp
// operations run uniformly per warp; one __syncthreads per line.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#ifndef __CUDACC__
#include <emulator/emulator.hpp>
#endif

namespace gpu {

inline constexpr unsigned kFullWarp = ~0u;

// Shape of a launch: `rows` times `blocks` blocks (blockIdx.y, blockIdx.x) on a stream of the
// caller.
struct Launch {
  unsigned blocks;
  unsigned threads;
  cudaStream_t stream = nullptr;
  size_t dynamic_bytes = 0;
  unsigned rows = 1;
  bool waits_for_host = false;  // the emulator must run those too
};

#ifdef __CUDACC__

// The block's only object of type T in shared memory. T needs no constructor and is uninitialized.
// Aligned, so that no vector load of it reads a neighbour, which racecheck reports.
template <class T>
__device__ __forceinline__ T& shared() {
  __shared__ __align__(16) T object;
  return object;
}

// The shared memory that Launch::dynamic_bytes asked for, aligned to 16 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char gpu_dynamic_shared[];
  return reinterpret_cast<T*>(gpu_dynamic_shared);
}

__device__ __forceinline__ unsigned lane_id() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Global memory in hot loops, in sizes of 1 to 16 bytes. Without a cache hint: on an H200 loads
// marked to be evicted first (.cs) reach 94 % of the rate of plain ones.
template <class T>
__device__ __forceinline__ T load(const T* p) {
  __builtin_assume(__isGlobal(p));
  return *p;
}
template <class T>
__device__ __forceinline__ void store(T* p, T value) {
  __builtin_assume(__isGlobal(p));
  *p = value;
}

// Global memory that another block of the same launch wrote before a release that this thread's
// block has acquired: past the L1 cache, never through the read-only one.
template <class T>
__device__ __forceinline__ T load_fresh(const T* p) {
  return __ldcg(p);
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned* p, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// A word in host memory, which the host stores with release order.
__device__ __forceinline__ unsigned load_acquire_system(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// A word that other blocks of the same launch read and write, without an order of other accesses.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* p) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(unsigned long long* p, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Adds with acquire and release order: publishes what this thread (and, after a __syncthreads, its
// block) wrote before, and sees what earlier callers published.
__device__ __forceinline__ unsigned add_release(unsigned* p, unsigned value) {
  unsigned old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(value)
               : "memory");
  return old;
}

// Waits briefly inside a spin loop.
__device__ __forceinline__ void pause() { __nanosleep(64); }
// The same in a loop that waits for the host: about this long.
__device__ __forceinline__ void sleep(unsigned ns) { __nanosleep(ns); }

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), const Launch& shape, A&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks, shape.rows);
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.dynamic_bytes;
  config.stream = shape.stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

#else

using emulator::add_release;
using emulator::dynamic_shared;
using emulator::lane_id;
using emulator::load;
using emulator::load_acquire;
using emulator::load_acquire_system;
using emulator::load_fresh;
using emulator::load_relaxed;
using emulator::pause;
using emulator::shared;
using emulator::sleep;
using emulator::store;
using emulator::store_relaxed;
using emulator::store_release;

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), const Launch& shape, A&&... arguments) {
  return emulator::launch(
      kernel, {shape.blocks, shape.threads, shape.dynamic_bytes, shape.rows, shape.waits_for_host},
      shape.stream, static_cast<P>(arguments)...);
}

#endif

// The lanes of the warp below the caller's, as a mask.
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

}  // namespace gpu
