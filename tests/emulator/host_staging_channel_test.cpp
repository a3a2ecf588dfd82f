// Plans and messages of ranks whose communicators join those of their host alone, over the emulated
// runtime: data between hosts uses bridges, also in graphs. Part of the program `streams`. Failures
// and aborts: tests/native/host_staging_test.cpp.
#include "device/host_staging_channel.h"

#include <string>
#include <vector>

#include "stream_ranks.hpp"

using namespace pycomm;
using namespace stream_ranks;

namespace {

const Test kCrosses("every plan crosses between hosts, and NCCL carries what is inside one", [] {
  for (const auto& hosts : {std::vector{0, 1}, std::vector{0, 0, 1}, std::vector{0, 1, 0, 1}})
    each_rank(
        static_cast<int>(hosts.size()),
        [](Rank& r) {
          for (const Operation operation : kCollectives)
            for (const Algorithm algorithm : collectives::algorithms_for(operation))
              for (const size_t count : {size_t{0}, size_t{7}, size_t{50}})
                run_case(r, {operation, algorithm, count, r.size / 2});
        },
        hosts);
});

void run_messages(Rank& r, std::span<const device::PeerMessage> messages) {
  r.engine.prepare(messages, r.stream);
  device::Event before(r.device);
  before.record(r.stream);
  r.engine.enqueue(messages, kLong, before)->stream_wait(r.stream);
}

void run_message(Rank& r, const device::PeerMessage& message) {
  run_messages(r, std::span(&message, message.bytes > 0 ? 1 : 0));  // none for an empty message
}

const Test kMessages("messages between hosts and inside one", [] {
  each_rank(3,
            [](Rank& r) {
              for (const size_t count : {size_t{0}, size_t{9}, size_t{3000}})
                for (int from = 0; from < 3; ++from)
                  for (int to = 0; to < 3; ++to) {
                    Floats x(count);
                    x.write([&](size_t i) { return element(r.rank, i); }, r.stream);
                    if (from != to && r.rank == from)
                      run_message(r, {to, true, x.bytes(), 4 * count});
                    if (from == to || r.rank != to) continue;
                    run_message(r, {from, false, x.bytes(), 4 * count});
                    const auto got = x.read(r.stream);
                    for (size_t i = 0; i < count; ++i)
                      expect_equal(got[i], element(from, i), "element");
                  }
            },
            {0, 0, 1});
});

// Runs a sum of two ranks, captures it in a graph, and runs that with other elements.
void replay(Rank& r, Floats& x, const device::StreamJob& job, size_t count) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  for (int turn = 0; turn < 4; ++turn) {
    x.write([&](size_t i) { return element(r.rank + turn, i); }, r.stream);
    if (turn == 0) {
      r.run(job);
      r.finish();  // a copy reads what is written next
      fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
      r.run(job);
      fine(cudaStreamEndCapture(r.stream, &graph));
      fine(cudaGraphInstantiate(&exec, graph, 0));
    } else {
      fine(cudaGraphLaunch(exec, r.stream));
    }
    const auto got = x.read(r.stream);
    for (size_t i = 0; i < count; ++i)
      expect_equal(got[i], element(turn, i) + element(turn + 1, i), "sum");
  }
  fine(cudaGraphExecDestroy(exec));
  fine(cudaGraphDestroy(graph));
}

// Elements of a message of three pieces.
constexpr size_t kLongCount = 5 * device::HostStagingChannel::kPieceBytes / 8 + 13;

const Test kLongMessages("messages of several pieces, in both directions at once", [] {
  each_rank(3,
            [](Rank& r) {
              Floats x(kLongCount), y(kLongCount), z(kLongCount);
              x.write([&](size_t i) { return element(r.rank, i); }, r.stream);
              std::vector<device::PeerMessage> messages;
              for (int i = 1; i < 3; ++i) {
                const int peer = (r.rank + i) % 3;
                Floats& into = i == 1 ? y : z;
                messages.push_back({peer, true, x.bytes(), 4 * kLongCount});
                messages.push_back({peer, false, into.bytes(), 4 * kLongCount});
              }
              run_messages(r, messages);
              for (int i = 1; i < 3; ++i) {
                const auto got = (i == 1 ? y : z).read(r.stream);
                for (size_t k = 0; k < kLongCount; ++k)
                  expect_equal(got[k], element((r.rank + i) % 3, k), "element");
              }
            },
            {0, 0, 1});
});

const Test kLongPlans("a plan with messages of several pieces, also in a graph", [] {
  each_rank(2,
            [](Rank& r) {
              Floats x(kLongCount);
              const Lanes stages = stages_of(r, Algorithm::direct, kLongCount);
              replay(r, x, all_reduce(x, kLongCount, &stages), kLongCount);
            },
            {0, 1});
});

const Test kReplayed(
    "a plan between hosts is captured in a graph, once there is memory for it", [] {
      each_rank(2,
                [](Rank& r) {
                  constexpr size_t kCount = 1000;
                  Floats x(kCount);
                  const Lanes stages = stages_of(r, Algorithm::ring, kCount, 2);
                  const device::StreamJob job = all_reduce(x, kCount, &stages);
                  fine(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal));
                  expect_throws<Unsupported>([&] { r.engine.prepare(job, r.stream); });
                  cudaGraph_t graph = nullptr;
                  fine(cudaStreamEndCapture(r.stream, &graph));
                  fine(cudaGraphDestroy(graph));
                  replay(r, x, job, kCount);
                },
                {0, 1});
    });

}  // namespace
