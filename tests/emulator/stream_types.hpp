// Streams, events and graphs of the emulated runtime as runtime.cpp stores them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "fiber.hpp"
#include "runtime.hpp"

namespace emulator {

using Run = std::function<bool()>;

// They share all memory, and each has streams of its own; a thread has one of them at a time.
inline constexpr int kDevices = 8;
inline thread_local int current_device = 0;
// Of the driver's interface; null before the thread's first call that needs one.
inline thread_local CUctx_st* current_context = nullptr;

// "Everything that was submitted to this stream so far."
struct Point {
  CUstream_st* stream = nullptr;
  uint64_t sequence = 0;
};

struct Operation {
  Run run;
  std::vector<Point> after;
  emulator::Occupies occupies;
  uint64_t number;  // in the order of submission to all streams
  bool started = false;
  Token submitted{};
};

struct Node {
  Run run;
  emulator::Occupies occupies;
};

}  // namespace emulator

struct CUctx_st {
  int device;
};

struct CUgraph_st {
  std::vector<emulator::Node>
      nodes;  // in the order of their submission, which every dependency agrees with
  bool broken = false;
  bool global = false;  // a query by any thread that is not relaxed ends the capture
};
struct CUgraphExec_st {
  std::vector<emulator::Node> nodes;
};

struct CUstream_st {
  int device = emulator::current_device;
  unsigned index = 0;    // on the device
  bool blocking = true;  // waits for the default stream, and the default stream for it
  std::deque<std::unique_ptr<emulator::Operation>> queue;
  uint64_t submitted = 0, completed = 0;
  emulator::Token done;
  void* fiber = emulator::__tsan_create_fiber ? emulator::__tsan_create_fiber(0) : nullptr;
  // The capture that the stream is part of: begun here, or joined by waiting for an event of it.
  std::shared_ptr<CUgraph_st> captured;
  bool began = false;
  uint64_t nodes = 0;  // so far, in this capture
  bool loose = false;  // has nodes that no other stream of the capture has waited for
};

struct CUevent_st {
  emulator::Point point;
  std::shared_ptr<CUgraph_st> captured;  // recorded in this capture, when `from` had `nodes`
  CUstream_st* from = nullptr;
  uint64_t nodes = 0;
};
