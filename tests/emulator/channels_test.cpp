// What streams of a device share: hardware channels, on which a command of one stream may wait
// behind one of another, and the number of resident blocks. Part of the program `streams`.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>
#include <atomic>
#include <latch>
#include <memory>
#include <vector>

#include "emulator/grid.hpp"
#include "emulator/runtime.hpp"
#include "stream_ranks.hpp"

using namespace pycomm;
using namespace stream_ranks;

namespace {

constexpr unsigned kChannels = 8, kQueries = 1000;

// The number of channels of each device during its lifetime.
class Channels {
 public:
  explicit Channels(unsigned count) { emulator::options().channels = count; }
  ~Channels() { emulator::options().channels = kChannels; }
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;
};

// One stream for each channel.
struct Streams {
  explicit Streams(const std::shared_ptr<device::Device>& device) {
    for (unsigned i = 0; i < kChannels; ++i)
      all.push_back(std::make_unique<device::Stream>(device));
  }
  cudaStream_t at(unsigned i) const { return static_cast<cudaStream_t>(all.at(i)->raw()); }
  std::vector<std::unique_ptr<device::Stream>> all;
};

// Later work of the stream waits until *word is 1, by the driver's command.
void wait_by_driver(cudaStream_t stream, const uint32_t* word) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  fine(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 11070, cudaEnableDefault,
                                        &result));
  const auto wait = reinterpret_cast<PFN_cuStreamWaitValue32_v11070>(found);
  expect(
      wait(stream, reinterpret_cast<CUdeviceptr>(word), 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS,
      "cuStreamWaitValue32");
}

// How many of `kChannels` streams cannot work while an earlier stream waits for the host.
unsigned blocked_streams(unsigned channels, bool by_driver) {
  const Channels limited(channels);
  const auto device = cuda::open_device(0);
  auto* const word = static_cast<uint32_t*>(device->allocate_host(sizeof(uint32_t)));
  std::atomic_ref(*word).store(0);
  const device::Stream waits(device);
  const Streams others(device);
  if (by_driver)
    wait_by_driver(static_cast<cudaStream_t>(waits.raw()), word);
  else
    device->wait_until(waits.raw(), word, 1);
  for (unsigned i = 0; i < kChannels; ++i) fine(emulator::enqueue(others.at(i), [] {}));
  unsigned blocked = 0;
  for (unsigned i = 0; i < kChannels; ++i) {
    unsigned queries = 0;
    while (queries < kQueries && cudaStreamQuery(others.at(i)) == cudaErrorNotReady) ++queries;
    blocked += queries == kQueries;
  }
  std::atomic_ref(*word).store(1, std::memory_order_release);
  device->finish(waits.raw());
  for (unsigned i = 0; i < kChannels; ++i) device->finish(others.at(i));
  device->release_host(word);
  return blocked;
}

const Test kDriver("the driver's wait for a value blocks the streams of its channel", [] {
  expect_equal(blocked_streams(1, true), kChannels, "streams, one channel");
  expect_equal(blocked_streams(kChannels, true), 1U, "streams, 8 channels");
});

const Test kKernel("a device's wait for the host blocks no other stream", [] {
  expect_equal(blocked_streams(1, false), 0U, "streams, one channel");
  expect_equal(blocked_streams(kChannels, false), 0U, "streams, 8 channels");
});

// Rank 1 begins its call when rank 0's other streams have worked, which they submit after the call.
void run_with_later_commands(unsigned channels) {
  const Channels limited(channels);
  std::atomic<unsigned> worked = 0;
  each_rank(2,
            [&](Rank& r) {
              constexpr size_t kCount = 100;
              Floats x(kCount);
              x.write([&](size_t i) { return element(r.rank, i); }, r.stream);
              const Lanes stages = stages_of(r, Algorithm::ring, kCount);
              const device::StreamJob job = all_reduce(x, kCount, &stages);
              const Streams others(r.device);
              if (r.rank == 1)
                fine(emulator::enqueue_polled(r.stream, [&] { return worked == kChannels; }));
              r.run(job);
              if (r.rank == 0)
                for (unsigned i = 0; i < kChannels; ++i)
                  fine(emulator::enqueue(others.at(i), [&] { ++worked; }));
              const auto got = x.read(r.stream);
              for (size_t i = 0; i < kCount; ++i) expect_equal(got[i], sum_of(2, i), "sum");
            },
            {0, 1});
}

const Test kUnrelated("a call between hosts lets later commands of other streams start", [] {
  run_with_later_commands(1);
  run_with_later_commands(kChannels);
});

// The communicators of a rank, each with a stream.
class Several {
 public:
  static constexpr size_t kCount = 4;

  Several(Rank& r, const std::array<nccl::NcclId, kCount>& ids, int max_ctas)
      : rank_(r), streams_(r.device) {
    for (size_t i = 0; i < kCount; ++i)
      expect(r.nccl->comm_init_rank(comms_.at(i), 2, ids.at(i), r.rank, {.max_ctas = max_ctas}) ==
                 nccl::NcclResult::success,
             "connected");
  }
  // Sends to the other rank and receives from it.
  void exchange(size_t i) {
    nccl::NcclApi& nccl = *rank_.nccl;
    const nccl::NcclQueue queue{comms_.at(i), stream(i)};
    nccl.group_start();
    nccl.send({x_.bytes(), nullptr, 4, nccl::NcclDtype::float32}, 1 - rank_.rank, queue);
    nccl.recv({nullptr, y_.bytes() + 16 * i, 4, nccl::NcclDtype::float32}, 1 - rank_.rank, queue);
    expect(nccl.group_end() == nccl::NcclResult::success, "a group");
  }
  // Lets the device work until this many more groups have started.
  void start(uint64_t groups) {
    const Deadline limit = soon();
    while (groups > 0 && !limit.expired()) {
      (void)cudaStreamQuery(stream(0));
      groups -= rank_.nccl->take_counts().groups;
    }
    expect(!limit.expired(), "groups start");
  }
  size_t unfinished() {
    size_t count = 0;
    for (size_t i = 0; i < kCount; ++i) {
      unsigned queries = 0;
      while (queries < kQueries && cudaStreamQuery(stream(i)) == cudaErrorNotReady) ++queries;
      count += queries == kQueries;
    }
    return count;
  }
  void finish() {
    for (size_t i = 0; i < kCount; ++i) fine(cudaStreamSynchronize(stream(i)));
  }
  void abort() {
    for (nccl::NcclComm* const comm : comms_) (void)rank_.nccl->comm_abort(comm);
  }

 private:
  cudaStream_t stream(size_t i) const { return streams_.at(static_cast<unsigned>(i)); }

  Rank& rank_;
  Streams streams_;
  std::array<nccl::NcclComm*, kCount> comms_{};
  Floats x_{4, 0}, y_{4 * kCount, 0};
};

// Both ranks start two of four calls, each the other two, and then the rest.
void start_in_opposite_orders(int max_ctas) {
  std::array<nccl::NcclId, Several::kCount> ids{};
  for (nccl::NcclId& id : ids) (void)FakeNccl().get_unique_id(id);
  std::latch started(2), checked(2);
  each_rank(2, [&](Rank& r) {
    Several several(r, ids, max_ctas);
    for (size_t i = 0; i < Several::kCount; ++i) several.exchange(i);  // connects
    several.finish();
    (void)r.nccl->take_counts();
    const auto nth = [&](size_t i) { return r.rank == 0 ? i : Several::kCount - 1 - i; };
    for (const size_t i : {0, 1}) several.exchange(nth(i));
    several.start(2);
    started.arrive_and_wait();
    for (const size_t i : {2, 3}) several.exchange(nth(i));
    const size_t unfinished = max_ctas == 0 ? several.unfinished() : 0;
    if (max_ctas > 0) several.finish();
    checked.arrive_and_wait();
    several.abort();
    expect_equal(unfinished, max_ctas == 0 ? Several::kCount : 0, "calls that cannot end");
  });
}

const Test kResident("kernels of communicators that fill a device wait for each other",
                     [] { start_in_opposite_orders(0); });

const Test kLimited("... and do not if their blocks are limited",
                    [] { start_in_opposite_orders(1); });

}  // namespace
