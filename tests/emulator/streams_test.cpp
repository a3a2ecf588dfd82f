// The stream engine over the emulated runtime and the fake NCCL: every plan gives the sums and
// sends as planned, calls are captured in a graph; mismatches, missing ranks, deaths and aborts
// end. Built plain and under sanitizers. Launches, bits, order and NCCL's own collectives:
// tests/devices.
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/choose.h"
#include "core/errors.h"
#include "cuda/cuda_device.h"
#include "cuda/host.hpp"
#include "device/stream_engine.h"
#include "emulator/fake_nccl.hpp"
#include "emulator/runtime.hpp"
#include "native/harness.h"
#include "stream_ranks.hpp"

using namespace pycomm;
using namespace stream_ranks;

namespace {

const Test kPlans("every plan sends its elements, aligned, and gives the sum", [] {
  for (const int size : {1, 2, 3, 5})
    each_rank(size, [](Rank& r) {
      for (const Operation operation : kCollectives)
        for (const Algorithm algorithm : collectives::algorithms_for(operation))
          for (const size_t count : {0, 7, 50, 1004})
            run_case(r, {operation, algorithm, count, r.size / 2});
    });
});

const Test kGraph("a call that is captured is replayed", [] {
  each_rank(3, [](Rank& r) {
    Floats x(64), y(64);
    const Lanes stages = stages_of(r, Algorithm::ring, 64, 2);
    x.write([](size_t) { return 0.f; }, r.stream);
    r.run(all_reduce(x, 64, &stages));
    r.finish();
    cudaGraph_t graph = nullptr;
    fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    fine(cudaMemcpyAsync(x.bytes(), y.bytes(), 256, cudaMemcpyDeviceToDevice, r.stream));
    r.run(all_reduce(x, 64, &stages));
    r.run(all_reduce(x, 64, nullptr));
    fine(cudaStreamEndCapture(r.stream, &graph));
    cudaGraphExec_t exec = nullptr;
    fine(cudaGraphInstantiate(&exec, graph, 0));
    (void)r.nccl->take_counts();
    for (int replay = 0; replay < 3; ++replay) {
      y.write([&](size_t i) { return element(r.rank + replay, i); }, r.stream);
      fine(cudaGraphLaunch(exec, r.stream));
      const auto got = x.read(r.stream);
      float first = 0;
      for (int rank = 0; rank < 3; ++rank) first += element(rank + replay, 5);
      expect_equal(got[5], 3 * first, "three times the sum");
    }
    expect_equal(r.nccl->take_counts().groups, uint64_t{3 * (2 * 4 + 1)}, "groups");
  });
});

const Test kCaptureScratch("an allocation in a capture is refused with a remedy", [] {
  each_rank(2, [](Rank& r) {
    Floats x(64);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
    const std::string why = expect_throws<Unsupported>([&] { r.run(all_reduce(x, 64, &stages)); });
    expect_says(why, "once before the capture");
    cudaGraph_t graph = nullptr;
    fine(cudaStreamEndCapture(r.stream, &graph));
  });
});

// A call of several launches may get the error before its last launch.
void try_run(Rank& r, const device::StreamJob& job) {
  try {
    r.run(job);
  } catch (const Error&) {  // error_of() looks at it
  }
}

// Waits until the communicator knows of an error.
nccl::NcclResult error_of(Rank& r) {
  const Deadline deadline(kLong);
  while (!deadline.expired()) {
    (void)cudaStreamQuery(r.stream);  // lets operations run
    const nccl::NcclResult now = r.engine.communicators().front()->state();
    if (now != nccl::NcclResult::success && now != nccl::NcclResult::in_progress) return now;
    std::this_thread::yield();
  }
  return nccl::NcclResult::success;
}

const Test kMismatch("both ranks report different counts", [] {
  each_rank(2, [](Rank& r) {
    const size_t count = r.rank == 0 ? 64 : 60;
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, count);
    try_run(r, all_reduce(x, count, &stages));
    const nccl::NcclResult error = error_of(r);
    const std::string text =
        r.engine.communicators().front()->error_of("ncclGroupEnd", error).what();
    expect(error == nccl::NcclResult::invalid_usage || error == nccl::NcclResult::remote_error,
           text);
    if (error == nccl::NcclResult::invalid_usage) expect_says(text, "count 12");
    r.engine.communicators().front()->abort();
    r.finish();
  });
});

const Test kAbort("an abort ends what waits for a rank that does not call", [] {
  std::latch over(1);
  each_rank(2, [&](Rank& r) {
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    r.run(all_reduce(x, 64, &stages));  // the first call waits where it is made
    r.finish();
    if (r.rank == 1) return over.wait();
    const CountDown tell{over};
    r.run(all_reduce(x, 64, &stages));
    (void)cudaStreamQuery(r.stream);
    r.engine.communicators().front()->abort();
    r.finish();
    const auto again = [&] { r.run(all_reduce(x, 64, &stages)); };
    (void)expect_throws<Error>(again);
  });
});

// NCCL connects the ranks of a communicator at its first call, which waits for the peers.
const Test kFirstCall("an abort ends a first call that waits for a rank", [] {
  std::latch over(1);
  each_rank(2, [&](Rank& r) {
    if (r.rank == 1) return over.wait();
    const CountDown tell{over};
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    std::atomic<bool> late = false;
    std::jthread aborts([&] {
      const Deadline limit = soon();
      while (fake_nccl::waiting_calls() == 0 && !limit.expired()) std::this_thread::yield();
      late = limit.expired();
      r.engine.communicators().front()->abort();
    });
    const std::string why = expect_throws<Error>([&] { r.run(all_reduce(x, 64, &stages)); });
    aborts.join();
    expect(!late, "the call did not wait");
    expect_says(why, "aborted");
  });
});

// The text of the first error of the ranks' engines.
std::string first_error(Rank& r, std::span<device::StreamEngine* const> engines) {
  for (const Deadline limit = soon(); !limit.expired(); std::this_thread::yield()) {
    (void)cudaStreamQuery(r.stream);  // lets operations run
    for (device::StreamEngine* const engine : engines) {
      nccl::Communicator& used = *engine->communicators().front();
      const nccl::NcclResult now = used.state();
      if (now != nccl::NcclResult::success && now != nccl::NcclResult::in_progress)
        return used.error_of("ncclGroupEnd", now).what();
    }
  }
  return "no error";
}

// Adds to `found` if this rank's error names the order.
void compare_orders(Rank& r, const nccl::NcclId& id, bool same, std::atomic<int>& found) {
  device::StreamEngine second(r.nccl, r.device, r.rank, r.size);
  second.connect({&id, 1}, {}, soon());
  const std::array engines{&r.engine, &second};
  Floats x(64, 0), y(64, 0);
  device::Event before(r.device);
  before.record(r.stream);
  std::vector<std::shared_ptr<device::Event>> ends;
  const auto run = [&](device::StreamEngine& engine) {
    Floats& array = &engine == &second ? y : x;
    ends.push_back(engine.enqueue(all_reduce(array, 64, nullptr), before));
  };
  const auto finish = [&] {
    for (const auto& end : ends) end->stream_wait(r.stream);
    r.finish();
  };
  for (device::StreamEngine* const engine : engines) run(*engine);  // connects them
  finish();
  const bool turned = !same && r.rank == 1;
  for (device::StreamEngine* const engine : {engines.at(turned), engines.at(!turned)}) run(*engine);
  if (same) return finish();
  const std::string why = first_error(r, engines);
  for (device::StreamEngine* const engine : engines) engine->abort("enough");
  finish();
  found += why.find("in different orders") != std::string::npos;
}

const Test kLaunchOrder("the fake finds communicators that ranks use in different orders", [] {
  for (const bool same : {true, false}) {
    nccl::NcclId id{};
    (void)FakeNccl().get_unique_id(id);
    std::atomic<int> found = 0;
    each_rank(2, [&](Rank& r) { compare_orders(r, id, same, found); });
    expect_equal(found > 0, !same, "an error names the order");
  }
});

const Test kGone("waiting for a rank that left ends with an error", [] {
  each_rank(3, [](Rank& r) {
    if (r.rank == 2) return;
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    try_run(r, all_reduce(x, 64, &stages));
    expect(error_of(r) == nccl::NcclResult::remote_error, "remote error");
    r.engine.communicators().front()->abort();
    r.finish();
  });
});

// Whether `body` returns within 10 s; then `release` is called, or at the end of that time, as
// `body` may wait for it.
bool returns_before(const std::function<void()>& release, const std::function<void()>& body) {
  constexpr double kTooLong = 10;
  std::atomic<bool> returned = false;
  bool late = false;
  std::thread releases([&, begin = soon()] {
    while (!returned && begin.elapsed_s() < kTooLong) std::this_thread::yield();
    late = !returned;
    release();
  });
  body();
  returned = true;
  releases.join();
  return !late;
}

// NCCL waits for the last graph with its calls before it ends a communicator.
const Test kGraphLives("an engine is closed while a graph with its calls lives", [] {
  each_rank(2, [](Rank& r) {
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    r.run(all_reduce(x, 64, &stages));
    r.finish();
    fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeRelaxed));
    r.run(all_reduce(x, 64, &stages));
    cudaGraph_t graph = nullptr;
    fine(cudaStreamEndCapture(r.stream, &graph));
    expect(returns_before([&] { cudaGraphDestroy(graph); }, [&] { r.engine.close(soon()); }),
           "close() waited for the graph");
  });
});

// Its stream waits for the caller's, which hangs: NCCL's abort does not return.
const Test kHangs("an abort returns while the caller's stream hangs", [] {
  each_rank(2, [](Rank& r) {
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    r.run(all_reduce(x, 64, &stages));
    r.finish();
    const auto open = std::make_shared<std::atomic<bool>>(false);
    const auto gate = [open] { return open->load(); };
    fine(emulator::enqueue_polled(r.stream, gate));
    r.run(all_reduce(x, 64, &stages));
    const bool returned =
        returns_before([&] { open->store(true); }, [&] { r.engine.abort("enough"); });
    r.finish();
    expect(returned, "the abort waited for the stream");
  });
});

const Test kMissing("waiting for a missing rank ends at the deadline", [] {
  FakeNccl names;
  nccl::NcclId id{};
  (void)names.get_unique_id(id);
  Rank alone{.rank = 0, .size = 2};
  const auto connect = [&] {
    alone.engine.connect(std::span(&id, 1), {}, Deadline(std::chrono::milliseconds(30)));
  };
  (void)expect_throws<Timeout>(connect);
});

const Test kTwice("two ranks on one device are refused, as by NCCL", [] {
  FakeNccl names;
  nccl::NcclId id{};
  (void)names.get_unique_id(id);
  std::vector<std::string> said(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      FakeNccl nccl;
      nccl::NcclComm* comm = nullptr;
      if (nccl.comm_init_rank(comm, 2, id, rank, {}) != nccl::NcclResult::success)
        said[static_cast<size_t>(rank)] = nccl.last_error();
    });
  for (std::thread& thread : threads) thread.join();
  // The other rank may only see that the first one left.
  const std::string both = said[0] + ", " + said[1];
  expect_says(both, "Duplicate GPU");
  for (const std::string& one : said) expect(!one.empty(), "a rank connected");
});

const Test kDefault("a capture is no capture of the default stream", [] {
  each_rank(1, [](Rank& r) {
    fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeGlobal));
    const bool captured = r.device->capturing(r.stream);
    std::string refused;
    try {
      expect(!r.device->capturing(nullptr), "the default stream is captured");
    } catch (const std::exception& error) {  // rethrown after the capture
      refused = error.what();
    }
    cudaGraph_t graph = nullptr;
    fine(cudaStreamEndCapture(r.stream, &graph));
    fine(cudaGraphDestroy(graph));
    expect(captured, "the captured stream is not");
    expect(refused.empty(), refused);
  });
});

const Test kRemedies("errors of an installation name what to change", [] {
  const auto text_of = [](cudaError_t error) {
    return expect_throws<Unsupported>([&] { cuda::check_cuda(error, "f"); });
  };
  const auto names = [](const std::string& text, const std::string& part) {
    expect_says(text, part);
  };
  for (const cudaError_t error : {cudaErrorInsufficientDriver, cudaErrorUnsupportedPtxVersion}) {
    names(text_of(error), "driver supports CUDA 12.8");
    names(text_of(error), "was built with CUDA 1");
  }
  names(text_of(cudaErrorUnsupportedPtxVersion), "CUDAARCHS");
  names(text_of(cudaErrorNoKernelImageForDevice), "CUDAARCHS");
  names(text_of(cudaErrorNoDevice), "need NVIDIA's driver and a GPU");
});

const Test kLoaded("kernels are loaded before they run beside NCCL's", [] {
  each_rank(2, [](Rank& r) {
    Floats x(64, 0);
    const Lanes stages = stages_of(r, Algorithm::ring, 64);
    r.run(all_reduce(x, 64, &stages));
    r.finish();
  });
  expect_equal(emulator::lazy_launches(), uint64_t{0}, "kernels loaded late");
});

const Test kStrict("the fake refuses what NCCL's documents forbid", [] {
  each_rank(2, [](Rank& r) {
    FakeNccl& nccl = *r.nccl;
    Floats x(8, 0);
    nccl::NcclComm* comm = nullptr;
    const nccl::NcclData data{x.bytes(), x.bytes(), 8, nccl::NcclDtype::float32};
    expect(nccl.all_reduce(data, nccl::NcclOp::sum, {comm, r.stream}) ==
               nccl::NcclResult::invalid_argument,
           "an invalid handle");
    expect(nccl.group_end() == nccl::NcclResult::invalid_usage, "no group");
    nccl::NcclComm* raw = nullptr;
    r.engine.communicators().front()->launch([&](nccl::NcclApi&, nccl::NcclComm* mine) {
      raw = mine;
      return nccl::NcclResult::success;
    });
    expect(nccl.all_reduce(data, nccl::NcclOp::sum, {raw, r.stream}) == nccl::NcclResult::success,
           "a call");
    expect(nccl.comm_destroy(raw) == nccl::NcclResult::invalid_usage, "in use");
    r.finish();
  });
});

}  // namespace
