// Host work that a stream waits for, over the emulated runtime: its order with earlier and later
// operations, also in graphs, and its end. Part of the program `streams`.
#include "device/host_callback_thread.h"

#include <cuda_runtime.h>

#include <atomic>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/cuda_device.h"
#include "device/host_gate.h"
#include "native/harness.h"

using namespace pycomm;

namespace {

// A stream of device 0, and memory of the host that it reads and writes.
struct Bench {
  static constexpr size_t kCount = 1000;
  std::shared_ptr<device::Device> device = cuda::open_device(0);
  device::Stream stream{device};
  int* shared = static_cast<int*>(device->allocate_host(kCount * sizeof(int)));
  int *in = allocate(), *out = allocate();
  device::HostCallbackThread relay{device, stream.raw()};

  int* allocate() { return static_cast<int*>(device->allocate(kCount * sizeof(int))); }
  ~Bench() {
    (void)relay.stop();
    device->finish(stream.raw());
    device->release(in);
    device->release(out);
    device->release_host(shared);
  }

  // in -> shared, each element of it plus 1 by the relay, -> out
  void add_one(bool captured = false) {
    device->copy(shared, in, kCount * sizeof(int), stream.raw());
    relay.begin(
        [this] {
          for (size_t i = 0; i < kCount; ++i) ++shared[i];
        },
        captured);
    relay.stream_wait(stream.raw(), 0);
    device->copy(out, shared, kCount * sizeof(int), stream.raw());
  }
  void fill(int value) {  // from memory that no other operation writes meanwhile
    kept.push_back(std::make_unique<std::vector<int>>(kCount, value));
    device->copy(in, kept.back()->data(), kCount * sizeof(int), stream.raw());
  }
  void expect_out(int value) {
    std::vector<int> got(kCount);
    device->copy(got.data(), out, kCount * sizeof(int), stream.raw());
    device->finish(stream.raw());
    expect_equal(got.front(), value, "the first");
    expect_equal(got.back(), value, "the last");
  }
  std::vector<std::unique_ptr<std::vector<int>>> kept;
};

const Test kBetween("host work is ordered between earlier and later operations of a stream", [] {
  Bench bench;
  for (int turn = 0; turn < 20; ++turn) {
    bench.fill(turn);
    bench.add_one();
    bench.fill(-1);  // after all of it
    if (turn % 3 == 0) bench.expect_out(turn + 1);
  }
  bench.expect_out(20);
});

const Test kReplayed("... in each run of a graph", [] {
  Bench bench;
  auto* const stream = static_cast<cudaStream_t>(bench.stream.raw());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  bench.add_one(true);
  expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "captured");
  expect(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "made");
  for (int turn = 0; turn < 5; ++turn) {
    bench.fill(turn);
    expect(cudaGraphLaunch(exec, stream) == cudaSuccess, "launched");
    bench.expect_out(turn + 1);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
});

const Test kStopped("a stream continues when the host aborts, and no later work begins", [] {
  std::latch inside(1), go_on(1);
  std::atomic<int> began = 0;
  Bench bench;
  bench.relay.begin(
      [&] {
        ++began;
        inside.count_down();
        go_on.wait();
      },
      false);
  bench.relay.stream_wait(bench.stream.raw(), 0);
  bench.relay.begin([&] { ++began; }, false);
  bench.relay.stream_wait(bench.stream.raw(), 0);
  const auto drive = [&] { (void)cudaStreamQuery(static_cast<cudaStream_t>(bench.stream.raw())); };
  while (!inside.try_wait()) drive();
  expect(bench.relay.stop(), "one runs");
  bench.device->finish(bench.stream.raw());
  go_on.count_down();
  expect_equal(began.load(), 1, "bodies that began");
});

// The host is ahead of the stream, or behind it.
const Test kGates("work behind a gate sees what the host wrote before it opened it", [] {
  Bench bench;
  device::HostGate gate(bench.device);
  bench.fill(-1);
  bench.device->copy(bench.out, bench.in, Bench::kCount * sizeof(int), bench.stream.raw());
  std::jthread host([&] {
    for (size_t i = 0; i < Bench::kCount; ++i) {
      bench.shared[i] = 7;
      gate.open();
    }
  });
  for (size_t i = 0; i < Bench::kCount; ++i) {
    gate.wait(bench.stream.raw());
    bench.device->copy(bench.out + i, bench.shared + i, sizeof(int), bench.stream.raw());
  }
  bench.expect_out(7);
  host.join();
  for (int turn = 0; turn < 2; ++turn) gate.open_forever();
  gate.wait(bench.stream.raw());
  bench.device->finish(bench.stream.raw());
});

}  // namespace
