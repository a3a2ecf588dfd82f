// Streams, events, memory and graphs of the CUDA runtime: see runtime.hpp.
#include "runtime.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "grid.hpp"
#include "lanes.hpp"
#include "stream_types.hpp"

using emulator::current_context;
using emulator::current_device;
using emulator::kDevices;
using emulator::Node;
using emulator::Operation;
using emulator::Point;
using emulator::Run;
using emulator::Token;

namespace {

thread_local Token* begun = nullptr;  // of a thread that runs streams without having used any
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local uint64_t calls = 0;  // of this thread that use a context
std::atomic<uint64_t> events = 0, event_queries = 0, host_waits = 0;
std::atomic<unsigned> contexts = 0;  // primary ones: a bit for each device
std::array<CUctx_st, kDevices> primary{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}};
thread_local std::vector<std::pair<CUcontext, int>> stack;  // contexts and devices below

// Never destroyed: a test may end with work in a stream.
struct State {
  std::recursive_mutex mutex;
  std::vector<CUstream_st*> streams = [] {  // the first ones are the devices' default streams
    std::vector<CUstream_st*> all;
    for (int device = 0; device < kDevices; ++device) {
      all.push_back(new CUstream_st);
      all.back()->device = device;
    }
    return all;
  }();
  emulator::Random random{1};
  uint64_t submitted = 0;                          // operations
  std::map<uint64_t, CUstream_st*> channel_waits;  // operations that occupy a channel, by number
  std::array<unsigned, kDevices> streams_made{}, resident{};  // resident: threads
  cudaError_t error = cudaSuccess;                            // stays, as after a fault on a GPU
  std::string text;
};

// Made before main(): the emulator is compiled without sanitizers, and the thread sanitizer would
// not see the guard of a static in a function.
State& all_state = *new State;
State& state() { return all_state; }

CUstream_st* default_of(int device) { return state().streams[static_cast<size_t>(device)]; }
CUstream_st* resolve(cudaStream_t s) {
  emulator::use_context();
  return s == nullptr ? default_of(current_device) : s;
}

bool reached(const Point& p) { return p.stream == nullptr || p.stream->completed >= p.sequence; }

// Whether a stream of the thread's device is captured.
bool capturing() {
  for (const CUstream_st* s : state().streams)
    if (s->captured && s->device == current_device) return true;
  return false;
}

void submit(CUstream_st* s, Run run, std::vector<Point> after = {},
            emulator::Occupies occupies = {}) {
  occupies.threads = std::min(occupies.threads, emulator::options().resident_threads);
  auto op = std::make_unique<Operation>(
      Operation{std::move(run), std::move(after), occupies, ++state().submitted});
  if (occupies.channel) state().channel_waits[op->number] = s;
  CUstream_st* base = default_of(s->device);
  for (CUstream_st* other : state().streams)
    if (other != s && other->device == s->device && other->blocking && s->blocking &&
        (s == base || other == base))
      op->after.push_back({other, other->submitted});
  op->submitted.release();
  s->queue.push_back(std::move(op));
  ++s->submitted;
}

// Runs the first operation of a stream at the stream's place in the happens-before order.
void step(CUstream_st* s) {
  Operation& op = *s->queue.front();
  unsigned& resident = state().resident.at(static_cast<size_t>(s->device));
  const unsigned threads = op.occupies.threads;
  if (!std::exchange(op.started, true)) resident += threads;
  void* host = nullptr;
  if (emulator::__tsan_get_current_fiber) {
    host = emulator::__tsan_get_current_fiber();
    emulator::__tsan_switch_to_fiber(s->fiber, emulator::kNoSync);
  }
  op.submitted.acquire();
  if (begun != nullptr) begun->acquire();
  for (const Point& p : op.after)
    if (p.stream != nullptr) p.stream->done.acquire();
  std::optional<emulator::Unseen> unseen(std::in_place);
  bool finished = true;
  try {
    if (op.run && state().error == cudaSuccess) finished = op.run();
  } catch (const std::exception& error) {
    state().error = cudaErrorLaunchFailure;
    state().text = error.what();
  }
  if (finished) {
    resident -= threads;
    state().channel_waits.erase(op.number);
    s->queue.pop_front();  // here, as the stream owns what the operation holds
    ++s->completed;
  }
  unseen.reset();
  s->done.release();
  if (host != nullptr) emulator::__tsan_switch_to_fiber(host, emulator::kNoSync);
}

// Whether an operation of another stream occupies the channel before this one.
bool behind_channel_wait(const CUstream_st* s, uint64_t number) {
  const unsigned channels = emulator::options().channels;
  return std::ranges::any_of(state().channel_waits, [&](const auto& wait) {
    const auto& [earlier, other] = wait;
    return earlier < number && other != s && other->device == s->device &&
           other->index % channels == s->index % channels;
  });
}

// Removes the streams whose next operation does not fit on its device beside those that run, and
// those of the device that were submitted later and have not started either.
void keep_resident(std::vector<CUstream_st*>& ready) {
  const auto next = [](const CUstream_st* s) -> const Operation& { return *s->queue.front(); };
  std::array<uint64_t, kDevices> first{};  // operation that would start, by device
  for (const CUstream_st* s : ready) {
    uint64_t& least = first.at(static_cast<size_t>(s->device));
    if (next(s).occupies.threads > 0 && !next(s).started && (least == 0 || next(s).number < least))
      least = next(s).number;
  }
  std::erase_if(ready, [&](const CUstream_st* s) {
    const auto device = static_cast<size_t>(s->device);
    const unsigned threads = next(s).occupies.threads;
    return threads > 0 && !next(s).started &&
           (next(s).number != first.at(device) ||
            state().resident.at(device) + threads > emulator::options().resident_threads);
  });
}

// Runs one operation of any stream. Returns whether there was one.
bool progress() {
  std::vector<CUstream_st*> ready;
  for (CUstream_st* s : state().streams) {
    if (s->queue.empty()) continue;
    bool may = !behind_channel_wait(s, s->queue.front()->number);
    for (const Point& p : s->queue.front()->after) may &= reached(p);
    if (may) ready.push_back(s);
  }
  keep_resident(ready);
  if (ready.empty()) return false;
  step(ready[state().random.below(static_cast<unsigned>(ready.size()))]);
  return true;
}

cudaError_t wait(const Point& p) {
  for (;;) {
    {
      const std::lock_guard lock(state().mutex);
      if (reached(p)) {
        if (p.stream != nullptr) p.stream->done.acquire();
        return state().error;
      }
      if (!progress()) {
        state().error = cudaErrorLaunchFailure;
        state().text = "streams wait for each other";
        return state().error;
      }
    }
    sched_yield();  // an operation that polls may need another thread
  }
}

// Everything that was submitted to a stream so far.
Point last_of(CUstream_st* s) {
  const std::lock_guard lock(state().mutex);
  return {s, s->submitted};
}

// Records a call that is forbidden while a stream is captured.
cudaError_t refuse_capture() {
  for (CUstream_st* s : state().streams)
    if (s->captured && s->device == current_device) s->captured->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

// Whether this thread may ask about events now.
bool may_query() {
  bool may = true;
  for (CUstream_st* s : state().streams) {
    if (!s->captured || !s->captured->global || capture_mode == cudaStreamCaptureModeRelaxed)
      continue;
    s->captured->broken = true;
    may = false;
  }
  return may;
}

void add_node(CUstream_st* s, Node node) {
  s->captured->nodes.push_back(std::move(node));
  ++s->nodes;
  s->loose = true;
}

// A stream that is captured waits for an event, or joins the capture that the event is of.
cudaError_t wait_captured(CUstream_st* s, const CUevent_st& event) {
  if (!s->captured) {
    s->captured = event.captured;
    s->nodes = 0;
    s->loose = true;
  }
  if (s->captured != event.captured) {
    s->captured->broken = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (event.from != s && event.from->nodes == event.nodes) event.from->loose = false;
  return cudaSuccess;
}

}  // namespace

cudaError_t emulator::enqueue_polled(cudaStream_t stream, Run operation, Occupies occupies) {
  if (inside_host_call()) return cudaErrorNotPermitted;
  const std::lock_guard lock(state().mutex);
  CUstream_st* s = resolve(stream);
  if (s->captured) {
    add_node(s, {std::move(operation), occupies});
    return state().error;
  }
  submit(s, std::move(operation), {}, occupies);
  while (options().eager && !s->queue.empty() && progress()) continue;
  return state().error;
}

cudaError_t emulator::finish(cudaStream_t stream) {
  Token here;
  here.release();
  begun = &here;
  const cudaError_t error = wait(last_of(stream));
  begun = nullptr;
  return error;
}

cudaError_t emulator::enqueue(cudaStream_t stream, std::function<void()> operation) {
  return enqueue_polled(stream, [run = std::move(operation)] { return run(), true; });
}

void emulator::use_context() {
  ++calls;
  if (current_context == nullptr) current_context = primary_context(current_device);
}
CUcontext emulator::primary_context(int device) {
  contexts |= 1U << device;
  return &primary.at(static_cast<size_t>(device));
}
void emulator::push_context(CUcontext context) {
  stack.emplace_back(current_context, current_device);
  current_context = context;
  current_device = context->device;
}
void emulator::pop_context() {
  std::tie(current_context, current_device) = stack.back();
  stack.pop_back();
}
uint64_t emulator::calls_of_thread() { return calls; }
bool emulator::has_context(int device) { return (contexts >> device & 1) != 0; }

uint64_t emulator::events_made() { return events; }
uint64_t emulator::queries() { return event_queries; }
uint64_t emulator::waits() { return host_waits; }

const char* emulator::failure() { return state().text.c_str(); }

void emulator::forget_failure() {
  state().error = cudaSuccess;
  state().text.clear();
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  current_context = emulator::primary_context(device);
  return emulator::use_context(), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  if (what != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  return *value = 2, cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  return error == cudaErrorLaunchFailure ? state().text.c_str()
                                         : "an error of the emulated runtime";
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  emulator::use_context();
  const std::lock_guard lock(state().mutex);
  if (capturing()) return refuse_capture();
  if (bytes > emulator::options().most_memory) return cudaErrorMemoryAllocation;
  if (posix_memalign(p, 256, std::max<size_t>(bytes, 1)) != 0) return cudaErrorMemoryAllocation;
  std::memset(*p, emulator::options().poison, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{1} << 34;
  return *free = std::min(*total, emulator::options().most_memory), cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  emulator::use_context();
  ++host_waits;
  std::vector<Point> all;
  {
    const std::lock_guard lock(state().mutex);
    for (CUstream_st* s : state().streams)
      if (s->device == current_device) all.push_back({s, s->submitted});
  }
  for (const Point& p : all) wait(p);
  return state().error;
}
cudaError_t cudaFree(void* p) {
  emulator::use_context();
  {
    const std::lock_guard lock(state().mutex);
    if (capturing()) return refuse_capture();
  }
  cudaDeviceSynchronize();
  std::free(p);
  return state().error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t s) {
  return emulator::enqueue(s, [=] {
    emulator::device_reads(from, bytes);
    emulator::device_writes(to, bytes);
    std::memmove(to, from, bytes);
  });
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s) {
  return emulator::enqueue(s, [=] {
    emulator::device_writes(p, bytes);
    std::memset(p, value, bytes);
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  emulator::use_context();
  const std::lock_guard lock(state().mutex);
  *s = new CUstream_st;
  (*s)->blocking = (flags & cudaStreamNonBlocking) == 0;
  (*s)->index = ++state().streams_made.at(static_cast<size_t>(current_device));
  state().streams.push_back(*s);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  const cudaError_t error = wait(last_of(s));
  const std::lock_guard lock(state().mutex);
  std::erase(state().streams, s);  // not deleted: an event may still refer to it
  return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUstream_st* s = resolve(stream);
  if (s->captured) return refuse_capture();
  ++host_waits;
  return wait(last_of(s));
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
  CUstream_st* waits = resolve(s);
  if (event->captured) return wait_captured(waits, *event);
  if (waits->captured) {
    waits->captured->broken = true;  // a capture cannot wait for operations outside it
    return cudaErrorStreamCaptureIsolation;
  }
  submit(waits, nullptr, {event->point});
  return state().error;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  emulator::use_context();
  ++events;
  return *event = new CUevent_st, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  emulator::use_context();
  return delete event, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  CUstream_st* s = resolve(stream);
  event->captured = s->captured;
  event->from = s;
  event->nodes = s->nodes;
  if (s->captured) return state().error;
  submit(s, nullptr);
  event->point = {s, s->submitted};
  return state().error;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  emulator::use_context();
  const std::lock_guard lock(state().mutex);
  if (event->captured) return cudaErrorCapturedEvent;
  if (!may_query()) return cudaErrorStreamCaptureUnsupported;
  ++event_queries;
  progress();
  if (!reached(event->point)) return cudaErrorNotReady;
  if (event->point.stream != nullptr) event->point.stream->done.acquire();
  return state().error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(state().mutex);
  if (s == nullptr || s->captured) return cudaErrorStreamCaptureUnsupported;
  s->captured = std::make_shared<CUgraph_st>();
  s->captured->global = mode == cudaStreamCaptureModeGlobal;
  s->began = true;
  s->nodes = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  const std::lock_guard lock(state().mutex);
  if (!s->captured || !s->began) return cudaErrorIllegalState;
  const std::shared_ptr<CUgraph_st> all = std::exchange(s->captured, nullptr);
  s->began = false;
  bool joined = true;
  for (CUstream_st* other : state().streams) {
    if (other->captured != all) continue;
    joined &= !other->loose;
    other->captured = nullptr;
  }
  *graph = nullptr;
  if (all->broken) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  *graph = new CUgraph_st{std::move(all->nodes)};  // events may keep `all`
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  emulator::use_context();
  const std::lock_guard lock(state().mutex);
  if (s == nullptr && capturing()) return cudaErrorStreamCaptureImplicit;
  *status =
      s != nullptr && s->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = new CUgraphExec_st{graph->nodes}, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  for (const Node& node : exec->nodes) emulator::enqueue_polled(s, node.run, node.occupies);
  return state().error;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

}  // extern "C"
