// A rank that dies in a call on arrays in heaps (no messages) or in a hierarchical call; during an
// addition, if there is one. The error of the others names it, and no rank waits without end.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/kernels.h"
#include "mortal.h"
#include "os/shared_heap.h"
#include "ranks.h"
#include "shared/hierarchical_all_reduce.h"
#include "shared/shared_call.h"

namespace {

using namespace pycomm;
using namespace pycomm::engine;
using namespace pycomm::shared;
using namespace std::chrono_literals;

// On the mortal rank's thread: additions until it dies; below 0: it does not die.
thread_local int additions_left = -1;
thread_local ranks::Life* life = nullptr;

void count_addition() {
  if (additions_left < 0 || additions_left-- > 0) return;
  life->end();
  throw ranks::Died();
}

const kernels::Reducer& sum() { return kernels::reducer(Dtype::float32, ReduceOp::sum); }

// A sum during which the mortal rank dies.
constexpr kernels::Reducer kFatal{
    .reduce =
        [](void* out, const void* a, const void* b, size_t count) {
          count_addition();
          sum().reduce(out, a, b, count);
        },
    .finish =
        [](void* out, const void* a, const void* b, size_t count, int size) {
          count_addition();
          sum().finish(out, a, b, count, size);
        },
    .fold = nullptr,
    .join = nullptr};

// A call, `hosts` of its ranks, and when one of them dies.
struct Scene {
  std::vector<int> hosts;
  size_t count;
  int mortal;
  int additions;  // that it finishes; -1: it does not make the call at all
  std::string text() const {
    return "rank " + std::to_string(mortal) + " of " + std::to_string(hosts.size()) +
           " dies after " + std::to_string(additions) + " additions: ";
  }
};

transport::Header header_of(Operation operation, size_t count) {
  transport::Header header;
  header.operation = static_cast<uint8_t>(operation);
  header.dtype = static_cast<uint8_t>(Dtype::float32);
  header.count = count;
  return header;
}

// The segments of one host's ranks, as rank `rank` sees them; null where it is alone there.
std::unique_ptr<SharedMemoryRegion> arena_of(
    const Scene& scene, int rank, const std::vector<std::shared_ptr<Segment>>& segments) {
  std::vector<std::shared_ptr<Segment>> here;
  std::vector<int> members;
  int index = 0;
  const int host = scene.hosts[static_cast<size_t>(rank)];
  for (size_t i = 0; i < scene.hosts.size(); ++i) {
    if (scene.hosts[i] != host) continue;
    if (static_cast<int>(i) == rank) index = static_cast<int>(members.size());
    members.push_back(static_cast<int>(i));
    here.push_back(segments[i]);
  }
  if (members.size() == 1) return nullptr;
  auto region = std::make_unique<SharedMemoryRegion>(std::move(here), members, index);
  region->set_heaps(std::vector<os::HeapView>(members.size(), os::SharedHeap::own()->view()));
  return region;
}

void run_shared(Engine& engine, SharedMemoryRegion* region, Operation operation, const float* input,
                float* output, size_t count, AccessMode mode = AccessMode::zero_copy) {
  const Job job{.header = engine.next_header(header_of(operation, count)),
                .input = reinterpret_cast<const std::byte*>(input),
                .output = reinterpret_cast<std::byte*>(output),
                .element_bytes = sizeof(float),
                .reducer = &kFatal,
                .operation = operation,
                .count = count};
  region->begin(job.header);
  SharedCall run(engine, *region, job);
  engine.run(run, job.header, Deadline(20s));
  expect(run.access_mode() == mode, "the call uses another access mode");
}

void all_reduce_mapped(Engine& engine, SharedMemoryRegion* region, const Scene& scene, float* x) {
  run_shared(engine, region, Operation::all_reduce, x, x, scene.count);
}

void all_reduce_staged(Engine& engine, SharedMemoryRegion* region, const Scene& scene, float* x) {
  std::vector<float> own(x, x + scene.count);
  run_shared(engine, region, Operation::all_reduce, own.data(), own.data(), scene.count,
             AccessMode::staged);
}

void broadcast_mapped(Engine& engine, SharedMemoryRegion* region, const Scene& scene, float* x) {
  run_shared(engine, region, Operation::broadcast, x, x, scene.count);
}

void all_gather_mapped(Engine& engine, SharedMemoryRegion* region, const Scene& scene, float* x) {
  std::vector<float> all(scene.count * scene.hosts.size());
  run_shared(engine, region, Operation::all_gather, x, all.data(), scene.count);
}

void reduce_scatter_mapped(Engine& engine, SharedMemoryRegion* region, const Scene& scene,
                           float* x) {
  std::vector<float> row(scene.count / scene.hosts.size());
  run_shared(engine, region, Operation::reduce_scatter, x, row.data(), row.size());
}

void all_reduce_two_levels(Engine& engine, SharedMemoryRegion* region, const Scene& scene,
                           float* x) {
  Job job;
  job.header = engine.next_header(header_of(Operation::all_reduce, scene.count));
  job.input = job.output = reinterpret_cast<std::byte*>(x);
  job.element_bytes = sizeof(float);
  job.reducer = &kFatal;
  job.size = static_cast<int>(scene.hosts.size());
  HierarchicalAllReduce(engine, region)
      .all_reduce(
          job,
          {.rank = engine.rank(), .size = job.size, .count = scene.count, .hosts = scene.hosts},
          Deadline(20s));
}

using Body = void (*)(Engine&, SharedMemoryRegion*, const Scene&, float*);

void survive(const Scene& scene, const std::function<void()>& call) {
  const auto ending = ranks::ending_of(call);
  expect(ending.is(ErrorKind::peer_lost) && ending.error->fields().peer == scene.mortal &&
             ending.says("rank " + std::to_string(scene.mortal)),
         scene.text() + ending.text());
  expect(ranks::ending_of(call).is(ErrorKind::group_broken),
         scene.text() + "the group still works");
}

void play(const Scene& scene, Body body) {
  const size_t size = scene.hosts.size();
  ranks::Channels all(static_cast<int>(size), "shm", scene.mortal, SIZE_MAX);
  const auto memory = os::SharedHeap::own()->allocate(size * scene.count * sizeof(float));
  std::vector<std::shared_ptr<Segment>> segments(size);
  for (auto& segment : segments) segment = std::make_shared<Segment>();
  std::vector<std::unique_ptr<Engine>> engines;
  for (size_t i = 0; i < size; ++i) engines.push_back(all.engine(static_cast<int>(i)));
  ranks::run(static_cast<int>(size), [&](int rank) {
    Engine& engine = *engines[static_cast<size_t>(rank)];
    const auto region = arena_of(scene, rank, segments);
    float* x = reinterpret_cast<float*>(memory.get()) + static_cast<size_t>(rank) * scene.count;
    std::fill_n(x, scene.count, 1.0F);
    const auto call = [&] { body(engine, region.get(), scene, x); };
    if (rank != scene.mortal) return survive(scene, call);
    if (scene.additions < 0) return all.life.end();
    additions_left = scene.additions;
    life = &all.life;
    expect_throws<ranks::Died>(call);
  });
}

const Test kMapped("all ranks detect a death in a call on arrays in heaps", [] {
  int mortal = 0;  // a piece has 33 blocks, each of two additions
  for (const int additions : {0, 1, 30, 65}) {
    play({{0, 0, 0}, 200'003, mortal % 3, additions}, all_reduce_mapped);
    play({{0, 0, 0}, 200'003, mortal++ % 3, additions}, reduce_scatter_mapped);
  }
  for (const Body body : {broadcast_mapped, all_gather_mapped})
    play({{0, 0, 0}, 200'003, mortal++ % 3, -1}, body);
});

const Test kStaged("all ranks detect a death while they copy through slots", [] {
  int mortal = 0;
  for (const int additions : {-1, 0, 1, 30, 65})
    play({{0, 0, 0}, 200'003, mortal++ % 3, additions}, all_reduce_staged);
});

// Blocks of 1 MiB: the first sum inside, one while the first block crosses, the last.
const Test kTwoLevels("all ranks detect a death in a hierarchical sum", [] {
  int mortal = 0;
  for (const int additions : {0, 20, 80, 150})
    play({{0, 0, 1, 1}, 700'001, mortal++ % 4, additions}, all_reduce_two_levels);
  play({{0, 0, 1}, 700'001, 1, -1}, all_reduce_two_levels);  // sends nothing between hosts
  play({{0, 1, 1}, 700'001, 0, 10}, all_reduce_two_levels);  // the only rank of its host
});

}  // namespace
