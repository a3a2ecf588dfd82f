// The part of the CUDA runtime that the project calls, over host memory: streams, events, memory,
// graphs. NVIDIA's headers declare it; runtime.cpp defines it under the same names.
//
// A stream is a queue of operations. Nothing runs at once: a waiting call (a synchronisation, a
// query) runs the operations that may run by then, in an order from the seed of options(), so that
// a missing event shows. An operation that is not ready (a peer is missing) is retried.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

namespace emulator {

// Runs after everything before it in the stream. While the stream is being captured it becomes a
// node of the graph instead.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> operation);

// What an operation occupies while it waits.
struct Occupies {
  // Its hardware channel: later commands cannot start, also of other streams that share it.
  bool channel = false;
  // Resident threads of its device, from its start to its end. It starts when they fit, after all
  // earlier operations that could start.
  unsigned threads = 0;
};

// The same for work that may not be ready yet: it returns whether it is done. Used for NCCL.
cudaError_t enqueue_polled(cudaStream_t stream, std::function<bool()> operation,
                           Occupies occupies = {});

// The same for work that waits for other streams: on a thread of its own, so that they proceed.
cudaError_t enqueue_beside(cudaStream_t stream, std::function<void()> operation,
                           Occupies occupies = {});

// Waits until the stream has done all that was submitted so far, even while it is captured.
cudaError_t finish(cudaStream_t stream);

// What a call that needs a context does: without a current one, it creates the primary context of
// the thread's current device.
void use_context();
CUcontext primary_context(int device);
// The thread's stack of contexts.
void push_context(CUcontext context);
void pop_context();
// How many of these calls this thread has made.
uint64_t calls_of_thread();

// By device: whether this process has a context there.
bool has_context(int device);

// How many launches were of kernels that cudaFuncGetAttributes had not loaded. CUDA loads such a
// kernel then, and may wait for the device.
uint64_t lazy_launches();
void note_launch(const void* kernel);

// Whether the thread is one of cudaLaunchHostFunc, which must not call CUDA.
bool inside_host_call();

// How many events this process has made, and how often it has asked whether one has passed.
uint64_t events_made();
uint64_t queries();
// How often the host has waited for a stream or a device, also to free memory.
uint64_t waits();

// The text for cudaErrorLaunchFailure: the emulator's error. Empty when nothing failed.
const char* failure();
void forget_failure();

}  // namespace emulator
