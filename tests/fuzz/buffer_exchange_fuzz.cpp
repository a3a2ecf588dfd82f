// Offers of arrays: the location of another rank's arrays on this host. If they are mapped, this
// rank works on them in place, so the location must be valid.
//
// The first byte of the input selects the call; the rest is the other rank's offer.
#include <cstring>
#include <memory>
#include <vector>

#include "core/operation.h"
#include "engine/engine.h"
#include "fuzz.h"
#include "shared/shared_call.h"
#include "shared/shared_memory_region.h"

namespace {

using namespace pycomm;

constexpr size_t kCount = 5000, kHeapBytes = 64 << 10;  // arrays are mapped from 16 KiB on

void add(void* out, const void* a, const void* b, size_t count) {
  for (size_t i = 0; i < count; ++i)
    static_cast<float*>(out)[i] = static_cast<const float*>(a)[i] + static_cast<const float*>(b)[i];
}
void join(void* out, const void* const* slots, size_t count, int size) {
  for (size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += static_cast<const float*>(slots[rank])[i];
    static_cast<float*>(out)[i] = sum;
  }
}
void finish(void* out, const void* a, const void* b, size_t count, int) { add(out, a, b, count); }
constexpr kernels::Reducer kAdd{add, finish, nullptr, join};

engine::EngineOptions options_of(int rank) {
  engine::EngineOptions options{.rank = rank};
  options.names = {"rank 0", "rank 1"};
  return options;
}

std::vector<std::unique_ptr<transport::Channel>> has_no_listener() {
  return std::vector<std::unique_ptr<transport::Channel>>(2);
}

// The parts of a rank that the task needs.
struct Rank {
  Rank(int rank, const std::vector<std::shared_ptr<shared::Segment>>& segments,
       const std::vector<os::HeapView>& heaps, Operation operation)
      : engine(has_no_listener(), options_of(rank)), region(segments, {0, 1}, rank) {
    region.set_heaps(heaps);
    std::byte* const heap = heaps[static_cast<size_t>(rank)].base.get();
    job = {.input = heap, .output = heap, .operation = operation, .count = kCount};
    if (operation == Operation::reduce_scatter) job.count /= 2;
    if (operation == Operation::all_gather) job.output = gathered.data();
    job.element_bytes = sizeof(float);
    job.reducer = &kAdd;
    job.header.operation = static_cast<uint8_t>(operation);
    job.header.count = job.count;
    region.begin(job.header);
    task.emplace(engine, region, job);
  }
  engine::Engine engine;
  shared::SharedMemoryRegion region;
  engine::Job job;
  std::vector<std::byte> gathered = std::vector<std::byte>(2 * kCount * sizeof(float));
  std::optional<shared::SharedCall> task;
};

}  // namespace

void fuzz::one(Input input) {
  if (input.empty()) return;
  constexpr std::array kOperations{Operation::all_reduce, Operation::broadcast,
                                   Operation::all_gather, Operation::reduce_scatter};
  std::vector<std::shared_ptr<shared::Segment>> segments;
  std::vector<os::HeapView> heaps;
  for (int rank = 0; rank < 2; ++rank) {
    segments.push_back(std::make_shared<shared::Segment>());
    heaps.push_back({std::shared_ptr<std::byte>(new std::byte[kHeapBytes](),
                                                std::default_delete<std::byte[]>()),
                     kHeapBytes});
  }
  const Operation operation = kOperations[std::to_integer<size_t>(input[0]) % kOperations.size()];
  Rank mine(0, segments, heaps, operation), other(1, segments, heaps, operation);
  demand(other.task->advance(), "no offer was made");
  auto& line = segments[1]->filled[0].tiny;
  std::memcpy(line.data(), input.data() + 1, std::min(line.size(), input.size() - 1));
  try {
    while (!mine.task->done() && mine.task->access_mode() != shared::AccessMode::staged &&
           mine.task->advance()) {
    }
  } catch (const PeerLost&) {
  }
}
