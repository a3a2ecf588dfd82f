// The core of the emulator: runs one grid of CUDA threads on the calling thread, a fiber for each.
//
// emulator.hpp is its interface for kernels; runtime.cpp has streams, events and memory. The
// sources of this folder are never instrumented: they call the sanitizers themselves, so that a
// sanitizer sees CUDA's happens-before order and not the scheduler's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace emulator {

using Where = std::source_location;

enum class Order : uint8_t { forward, reverse, random };

// Options of a run. A program sets them before it launches; tests try all orders.
struct Options {
  Order order = Order::forward;
  uint64_t seed = 1;
  unsigned resident_blocks = 4;  // blocks that make progress together
  unsigned char poison = 0xff;   // the contents of fresh shared and device memory
  uint64_t most_spins = 1u << 20;
  bool eager = false;     // an operation runs when it is enqueued, for callers that never wait
  unsigned channels = 8;  // of a device, shared by its streams; CUDA_DEVICE_MAX_CONNECTIONS
  unsigned resident_threads = 4096;     // of kernels that wait for others, on a device
  size_t most_memory = ~size_t{0};      // bytes that one cudaMalloc() finds, at most
  bool no_image = false;                // cudaFuncGetAttributes finds no kernel for the device
  std::function<void()> before_grid{};  // for a test that changes memory between two kernels
};
Options& options();

// The running CUDA thread as its kernel sees it.
struct Thread {
  uint3 thread_index{}, block_index{};
  dim3 block_size{}, grid_size{};
  unsigned lane = 0;
};
extern thread_local constinit Thread* current;

struct Shape {
  unsigned blocks;
  unsigned threads;
  size_t dynamic_bytes = 0;
  unsigned rows = 1;
  bool waits_for_host = false;
};

// How many threads must be resident at once if the grid waits for others.
inline unsigned resident_threads(const Shape& shape) {
  return shape.blocks * shape.rows * ((shape.threads + 31) / 32 * 32);
}

enum class WarpOp : uint8_t { sync, ballot, all, any, match, shuffle, up, down, across };

struct WarpCall {
  WarpOp op{};
  unsigned mask = 0;
  uint64_t value = 0;
  unsigned argument = 0;  // source lane, distance or lane mask of a shuffle
  unsigned width = 32;
  Where where = Where::current();
};

// Runs the grid to its end; several threads may run one each. Throws std::runtime_error with file,
// line and the state of every thread for a mistake: a deadlock, barriers that diverge, a mask that
// cannot be, too much shared memory.
void run_grid(const Shape& shape, void (*entry)(void*), void* argument);

// The functions behind emulator.hpp.
unsigned sync_block(bool predicate, Where where);  // how many threads' predicate held
uint64_t warp(const WarpCall& call);
void spin(Where where);           // lets every other thread of the grid run; inside each spin loop
void wait_for_host(Where where);  // the same for a word that the host sets
void learn();                     // the thread acquired what others released
void maybe_switch();              // in random order: lets others run now and then; around atomics
void* shared_memory(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared_memory();
void count_load(size_t bytes);
void count_store(size_t bytes);
[[noreturn]] void fail(const std::string& what, Where where = Where::current());

// Bytes that went through gpu::load and gpu::store, and kernels launched, since the last reset.
struct Traffic {
  uint64_t loaded = 0, stored = 0, launches = 0;
};
Traffic& traffic();

}  // namespace emulator
