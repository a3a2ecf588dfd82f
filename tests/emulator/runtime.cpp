// Streams, events, memory and graphs of the CUDA runtime: see runtime.hpp.
#include "runtime.hpp"

#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "grid.hpp"
#include "lanes.hpp"

using emulator::Token;

namespace {

using Run = std::function<bool()>;

// "Everything that was submitted to this stream so far."
struct Point {
  CUstream_st* stream = nullptr;
  uint64_t sequence = 0;
};

struct Operation {
  Run run;
  std::vector<Point> after;
  Token submitted;
};

}  // namespace

struct CUgraph_st {
  std::vector<Run> nodes;
};
struct CUgraphExec_st {
  std::vector<Run> nodes;
};

struct CUstream_st {
  bool blocking = true;  // waits for the default stream, and the default stream for it
  std::deque<std::unique_ptr<Operation>> queue;
  uint64_t submitted = 0, completed = 0;
  Token done;
  void* fiber = emulator::__tsan_create_fiber ? emulator::__tsan_create_fiber(0) : nullptr;
  std::unique_ptr<CUgraph_st> captured;
  bool capture_broken = false;
};

struct CUevent_st {
  Point point;
};

namespace {

// Never destroyed: a test may end with work in a stream.
struct State {
  std::recursive_mutex mutex;
  std::vector<CUstream_st*> streams{new CUstream_st};  // the first is the default stream
  emulator::Random random{1};
  cudaError_t error = cudaSuccess;  // stays, as after a fault on a GPU
  std::string text;
  int device = 0;
};
State& state() {
  static State* all = new State;
  return *all;
}

CUstream_st* resolve(cudaStream_t s) { return s == nullptr ? state().streams[0] : s; }

bool reached(const Point& p) { return p.stream == nullptr || p.stream->completed >= p.sequence; }

bool capturing() {
  for (const CUstream_st* s : state().streams)
    if (s->captured) return true;
  return false;
}

void submit(CUstream_st* s, Run run, std::vector<Point> after = {}) {
  auto op = std::make_unique<Operation>();
  op->run = std::move(run);
  op->after = std::move(after);
  CUstream_st* base = state().streams[0];
  for (CUstream_st* other : state().streams)
    if (other != s && other->blocking && s->blocking && (s == base || other == base))
      op->after.push_back({other, other->submitted});
  op->submitted.release();
  s->queue.push_back(std::move(op));
  ++s->submitted;
}

// Runs the first operation of a stream in the stream's own place of the happens-before order.
void step(CUstream_st* s) {
  Operation& op = *s->queue.front();
  void* host = nullptr;
  if (emulator::__tsan_get_current_fiber) {
    host = emulator::__tsan_get_current_fiber();
    emulator::__tsan_switch_to_fiber(s->fiber, emulator::kNoSync);
  }
  op.submitted.acquire();
  for (const Point& p : op.after)
    if (p.stream != nullptr) p.stream->done.acquire();
  bool finished = true;
  try {
    if (op.run && state().error == cudaSuccess) finished = op.run();
  } catch (const std::exception& error) {
    state().error = cudaErrorLaunchFailure;
    state().text = error.what();
  }
  if (finished) {
    s->queue.pop_front();  // here, as the stream owns what the operation holds
    ++s->completed;
  }
  s->done.release();
  if (host != nullptr) emulator::__tsan_switch_to_fiber(host, emulator::kNoSync);
}

// One operation of some stream that may run. Whether there was one.
bool progress() {
  std::vector<CUstream_st*> ready;
  for (CUstream_st* s : state().streams) {
    if (s->queue.empty()) continue;
    bool may = true;
    for (const Point& p : s->queue.front()->after) may &= reached(p);
    if (may) ready.push_back(s);
  }
  if (ready.empty()) return false;
  step(ready[state().random.below(static_cast<unsigned>(ready.size()))]);
  return true;
}

cudaError_t wait(const Point& p) {
  while (!reached(p)) {
    {
      const std::lock_guard lock(state().mutex);
      if (!progress() && !reached(p)) {
        state().error = cudaErrorLaunchFailure;
        state().text = "streams wait for each other";
        return state().error;
      }
    }
    sched_yield();  // an operation that polls may need another thread
  }
  if (p.stream != nullptr) p.stream->done.acquire();
  return state().error;
}

// What must not happen while a stream is captured.
cudaError_t refuse_capture() {
  for (CUstream_st* s : state().streams) s->capture_broken |= s->captured != nullptr;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t allocate(void** p, size_t bytes) {
  if (capturing()) return refuse_capture();
  if (posix_memalign(p, 256, bytes == 0 ? 1 : bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*p, emulator::options().poison, bytes);
  return cudaSuccess;
}

}  // namespace

cudaError_t emulator::enqueue_polled(cudaStream_t stream, Run operation) {
  const std::lock_guard lock(state().mutex);
  CUstream_st* s = resolve(stream);
  if (s->captured) {
    s->captured->nodes.push_back(std::move(operation));
    return state().error;
  }
  submit(s, std::move(operation));
  while (options().eager && !s->queue.empty() && progress()) continue;
  return state().error;
}

cudaError_t emulator::enqueue(cudaStream_t stream, std::function<void()> operation) {
  return enqueue_polled(stream, [run = std::move(operation)] { return run(), true; });
}

const char* emulator::failure() { return state().text.c_str(); }

void emulator::forget_failure() {
  state().error = cudaSuccess;
  state().text.clear();
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = state().device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  if (what != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  return *value = 2, cudaSuccess;
}
cudaError_t cudaGetLastError() { return state().error; }
cudaError_t cudaPeekAtLastError() { return state().error; }
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  return error == cudaErrorLaunchFailure ? state().text.c_str()
                                         : "an error of the emulated runtime";
}

cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes); }
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return allocate(p, bytes); }
cudaError_t cudaDeviceSynchronize() {
  for (CUstream_st* s : state().streams) wait({s, s->submitted});
  return state().error;
}
cudaError_t cudaFree(void* p) {
  if (capturing()) return refuse_capture();
  cudaDeviceSynchronize();
  std::free(p);
  return state().error;
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
  return emulator::enqueue(s, [p] { std::free(p); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t s) {
  return emulator::enqueue(s, [=] { std::memmove(to, from, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s) {
  return emulator::enqueue(s, [=] { std::memset(p, value, bytes); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void* data) {
  return emulator::enqueue(s, [=] { function(data); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  const std::lock_guard lock(state().mutex);
  *s = new CUstream_st;
  (*s)->blocking = (flags & cudaStreamNonBlocking) == 0;
  state().streams.push_back(*s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  const cudaError_t error = wait({s, s->submitted});
  const std::lock_guard lock(state().mutex);
  std::erase(state().streams, s);  // not deleted: an event may still point at it
  return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUstream_st* s = resolve(stream);
  if (s->captured) return refuse_capture();
  return wait({s, s->submitted});
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  CUstream_st* s = resolve(stream);
  if (s->captured) return refuse_capture();
  progress();
  if (!reached({s, s->submitted})) return cudaErrorNotReady;
  s->done.acquire();
  return state().error;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(state().mutex);
  submit(resolve(s), nullptr, {event->point});
  return state().error;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  CUstream_st* s = resolve(stream);
  submit(s, nullptr);
  event->point = {s, s->submitted};
  return state().error;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait(event->point); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(state().mutex);
  progress();
  return reached(event->point) ? state().error : cudaErrorNotReady;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  if (s == nullptr || s->captured) return cudaErrorStreamCaptureUnsupported;
  s->captured = std::make_unique<CUgraph_st>();
  s->capture_broken = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  if (!s->captured) return cudaErrorIllegalState;
  *graph = s->captured.release();
  if (!s->capture_broken) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  *status =
      s != nullptr && s->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = new CUgraphExec_st{graph->nodes}, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  for (const Run& node : exec->nodes) emulator::enqueue_polled(s, node);
  return state().error;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

}  // extern "C"
