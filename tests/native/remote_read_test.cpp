// Calls on private arrays in one host: the ranks read each other's processes, or use slots, as the
// lowest rank finds faster. The ranks share one process and thread, so that a test controls the
// order of their steps; tests/ranks/test_shared_arrays.py has real processes.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "harness.h"
#include "os/process_memory.h"
#include "os/shared_heap.h"
#include "os/shared_memory.h"
#include "shared/shared_call.h"

using namespace pycomm;

namespace {

// Several steps of 256 KiB, and pieces of unequal length.
constexpr size_t kCount = 400'003;

struct Rank {
  Rank(int rank, const std::vector<std::shared_ptr<shared::Segment>>& segments,
       std::vector<int> members)
      : engine(std::vector<std::unique_ptr<transport::Channel>>(segments.size()),
               {.rank = rank, .names = {}, .interrupted = {}}),
        region(segments, std::move(members), rank) {
    region.set_heaps(std::vector<os::HeapView>(segments.size(), os::SharedHeap::own()->view()));
  }
  engine::Engine engine;
  shared::SharedMemoryRegion region;
  std::vector<float> input, output, result;
  shared::SharedJob job;
  transport::Header header;
  std::optional<shared::SharedCall> call;
};

// The shared memory of the ranks of one host.
class Host {
 public:
  explicit Host(int size) {
    std::vector<std::shared_ptr<shared::Segment>> segments;
    for (int i = 0; i < size; ++i) segments.push_back(std::make_shared<shared::Segment>());
    std::vector<int> members(segments.size());
    std::iota(members.begin(), members.end(), 0);
    for (int i = 0; i < size; ++i) ranks_.push_back(std::make_unique<Rank>(i, segments, members));
  }
  Rank& of(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // Every rank begins the call; of broadcast the last rank is the root.
  void begin(Operation operation, size_t count, bool in_place) {
    const auto ranks = static_cast<size_t>(size());
    in_place &= operation == Operation::all_reduce || operation == Operation::broadcast;
    for (int i = 0; i < size(); ++i) {
      Rank& rank = of(i);
      const bool rows_in = operation == Operation::reduce_scatter;
      const bool rows_out = operation == Operation::all_gather;
      rank.input.resize(count * (rows_in ? ranks : 1));
      rank.output.assign(count * (rows_out ? ranks : 1), -1.0F);
      for (size_t j = 0; j < rank.input.size(); ++j) rank.input[j] = value(i, j);
      if (operation == Operation::broadcast) rank.output = rank.input;
      auto* input = reinterpret_cast<std::byte*>(rank.input.data());
      auto* output = in_place ? input : reinterpret_cast<std::byte*>(rank.output.data());
      rank.job = {.operation = operation,
                  .input = input,
                  .output = output,
                  .count = count,
                  .element_bytes = sizeof(float),
                  .root = operation == Operation::broadcast ? size() - 1 : 0,
                  .reducer = &kernels::reducer(Dtype::float32, ReduceOp::sum)};
      rank.header.sequence = calls_;
      rank.header.operation = static_cast<uint8_t>(operation);
      rank.header.count = count;
      rank.region.begin(rank.header);
      rank.call.emplace(rank.engine, rank.region, rank.job, rank.header);
    }
    ++calls_;
  }

  // Each rank in turn takes a step, or as many as it can; false once no rank can step. A finished
  // rank reuses its arrays.
  bool advance(bool as_far_as_it_can = false) {
    bool moved = false;
    for (const auto& rank : ranks_) {
      if (!rank->call || rank->call->done()) continue;
      while (rank->call->advance()) {
        moved = true;
        if (rank->call->done() || !as_far_as_it_can) break;
      }
      if (!rank->call->done()) continue;
      const bool in_place = rank->job.output == rank->job.input;
      rank->result = in_place ? rank->input : rank->output;
      std::ranges::fill(rank->input, -9.0F);
      std::ranges::fill(rank->output, -9.0F);
    }
    return moved;
  }

  // Runs the whole call, checks its results, and returns the access mode of all ranks.
  shared::AccessMode run(Operation operation, size_t count, bool in_place = false) {
    begin(operation, count, in_place);
    while (advance(calls_ % 3 > 0)) {
    }
    for (int i = 0; i < size(); ++i) {
      expect(of(i).call->done(), "rank " + std::to_string(i) + " does not finish");
      expect(of(i).call->access_mode() == of(0).call->access_mode(),
             "the ranks used different access modes");
      expect_result(i);
    }
    const shared::AccessMode mode = *of(0).call->access_mode();
    for (const auto& rank : ranks_) rank->call.reset();
    return mode;
  }

  static float value(int rank, size_t i) { return static_cast<float>((i % 97 + 1) * (rank + 1)); }

 private:
  void expect_result(int i) {
    const shared::SharedJob& job = of(i).job;
    const std::vector<float>& found = of(i).result;
    const float all = static_cast<float>(size() * (size() + 1) / 2);
    const size_t row = job.operation == Operation::reduce_scatter ? static_cast<size_t>(i) : 0;
    const int rows = job.operation == Operation::all_gather ? size() : 1;
    for (size_t j = 0; j < job.count; ++j)
      for (int peer = 0; peer < rows; ++peer) {
        const float truth = job.operation == Operation::broadcast ? value(job.root, j)
                            : job.operation == Operation::all_gather
                                ? value(peer, j)
                                : value(0, row * job.count + j) * all;
        expect_equal(found[static_cast<size_t>(peer) * job.count + j], truth, "an element");
      }
  }

  std::vector<std::unique_ptr<Rank>> ranks_;
  uint32_t calls_ = 0;
};

// Until every slot was in use there are no trials. The first call finds which ranks may read each
// other.
void warm(Host& host) {
  while (!host.of(0).region.is_warm())
    expect(host.run(Operation::all_reduce, 65'539) == shared::AccessMode::staged,
           "a trial while slots are new");
}

void verbs_test() {
  for (const int size : {2, 3, 5})
    for (const Operation operation : {Operation::all_reduce, Operation::broadcast,
                                      Operation::all_gather, Operation::reduce_scatter})
      for (const size_t count : {size_t{65'539}, kCount}) {
        Host host(size);
        expect(host.run(operation, count) == shared::AccessMode::staged,
               "read before the permission was known");
        warm(host);
        std::vector<shared::AccessMode> ways;
        for (int i = 0; i < 8; ++i) ways.push_back(host.run(operation, count, i % 2 == 0));
        expect_equal(std::ranges::count(ways, shared::AccessMode::remote_read), 4,
                     "trials by reading");
        expect_equal(std::ranges::count(ways, shared::AccessMode::staged), 4,
                     "trials through slots");
      }
}
const Test kVerbs{"private arrays are read in place, in half of the trials", verbs_test};

void small_test() {
  Host host(2);
  warm(host);
  for (int i = 0; i < 10; ++i)
    expect(host.run(Operation::all_reduce, 65'535, i % 2 == 0) == shared::AccessMode::staged,
           "is read");
}
const Test kSmall{"small arrays, cheaper to copy than the system calls, use slots", small_test};

// With pieces of one length in all chunks: else ranks sum a few elements more or less.
void counters_test() {
  for (const Operation operation : {Operation::all_reduce, Operation::broadcast,
                                    Operation::all_gather, Operation::reduce_scatter}) {
    Host host(2);
    warm(host);
    std::vector<std::vector<uint64_t>> by_way(2);
    for (int i = 0; i < 3; ++i) {
      std::vector<uint64_t> before, moved;
      const auto counts = [&](std::vector<uint64_t>& into) {
        for (int rank = 0; rank < 2; ++rank) {
          into.push_back(host.of(rank).region.bytes_sent);
          into.push_back(host.of(rank).region.bytes_received);
        }
      };
      counts(before);
      const shared::AccessMode mode = host.run(operation, 400'000);
      counts(moved);
      for (size_t j = 0; j < moved.size(); ++j) moved[j] -= before[j];
      by_way[mode == shared::AccessMode::remote_read ? 1 : 0] = moved;
    }
    expect(by_way[0] == by_way[1] && !by_way[0].empty(),
           std::string(name_of(operation)) + ": the access modes count differently");
  }
}
const Test kCounters{"both access modes count the same bytes", counters_test};

// Runs until all ranks know that they may read each other, so that the next call reads.
void until_pulled(Host& host) {
  warm(host);
  expect(host.run(Operation::all_reduce, kCount) == shared::AccessMode::staged, "the first trial");
}

// Records a turn that costs `first` or `second`, by the alternative that it uses.
void record(shared::OnlineTuner& tuner, double first, double second) {
  tuner.record_cost(tuner.turns, tuner.uses_second(tuner.turns) ? second : first);
  ++tuner.turns;
}

void trials_test() {
  shared::OnlineTuner tuner(0, 8, 64);
  std::vector<uint64_t> begins;
  for (uint64_t turn = 0; turn < 400; ++turn) {
    if (tuner.tries(turn) && (turn == 0 || !tuner.tries(turn - 1))) begins.push_back(turn);
    const bool even = begins.size() % 2 == 0;  // which one is faster changes with every trial
    if (!tuner.tries(turn))
      expect(tuner.uses_second(turn) == even, "the faster one of the last trial");
    if (tuner.tries(turn)) {
      const double luck = turn == begins.back() + 1 ? -0.9 : 0;
      tuner.record_cost(turn, (tuner.uses_second(turn) == even ? 1.0 : 2.0) + luck);
    }
  }
  expect(begins == std::vector<uint64_t>{0, 16, 48, 112, 176, 240, 304, 368}, "begins of trials");
}
const Test kTrials{"the mode with the faster trials is used until the next trials", trials_test};

void slower_test() {
  shared::OnlineTuner tuner(0, 8, 256);
  while (tuner.turns < 100) record(tuner, 1.0, 2.0);
  expect(!tuner.uses_second(tuner.turns), "the first one is faster");
  const uint64_t changed = tuner.turns;
  while (!tuner.prefers_second() && tuner.turns < changed + 100) record(tuner, 4.0, 2.0);
  expect(tuner.turns - changed <= 24,
         "turns until the change: " + std::to_string(tuner.turns - changed));
}
const Test kSlower{"a mode that becomes slower is left", slower_test};

// A disturbance during one trial must not last.
void disturbed_test() {
  shared::OnlineTuner tuner(0, 8, 256);
  while (tuner.turns < 100) record(tuner, 1.0, 2.0);
  while (!tuner.tries(tuner.turns)) record(tuner, 1.0, 2.0);
  while (tuner.tries(tuner.turns)) record(tuner, 8.0, 2.0);
  expect(tuner.prefers_second(), "the trial was disturbed");
  const uint64_t disturbed = tuner.turns;
  while (tuner.prefers_second() && tuner.turns < disturbed + 100) record(tuner, 1.0, 2.0);
  expect(tuner.turns - disturbed <= 24,
         "turns with the slower one: " + std::to_string(tuner.turns - disturbed));
  // Now the second one stays better: further trials become rare.
  uint64_t trials = 0;
  for (const uint64_t end = tuner.turns + 2000; tuner.turns < end; record(tuner, 4.0, 3.0))
    trials += tuner.tries(tuner.turns);
  expect(tuner.prefers_second() && trials <= 200, "turns in trials: " + std::to_string(trials));
}
const Test kDisturbed{"a disturbed trial is repeated", disturbed_test};

void missing_test() {
  shared::OnlineTuner tuner(0, 8, 256);
  for (int i = 0; i < 4; ++i) record(tuner, 2.0, 1.0);
  tuner.turns = 500;  // of calls that failed
  tuner.advance_to(tuner.turns);
  expect(tuner.prefers_second(), "the turns that were recorded count");
  while (tuner.turns < 900) record(tuner, 1.0, 2.0);
  expect(!tuner.prefers_second(), "later trials follow");
}
const Test kMissing{"a trial of which turns are missing ends", missing_test};

// Ranks that missed different turns must make the same trials from then on.
void skipped_test() {
  shared::OnlineTuner each(0, 8, 256), last(0, 8, 256);
  for (uint64_t turn = 0; turn < 500; ++turn) each.advance_to(turn);
  for (uint64_t turn = 500; turn < 900; ++turn) {
    each.advance_to(turn);
    last.advance_to(turn);
    expect(each.tries(turn) == last.tries(turn), "turn " + std::to_string(turn));
  }
}
const Test kSkipped{"skipped turns do not shift later trials", skipped_test};

void unreached_test() {
  Host host(3);
  host.of(1).region.reaches = shared::SharedMemoryRegion::Reach::not_all;
  for (int i = 0; i < 10; ++i)
    expect(host.run(Operation::all_reduce, kCount) == shared::AccessMode::staged,
           "read although not all ranks may");
}
const Test kUnreached{"if one rank may not read the others, none does", unreached_test};

// A process of another namespace may have the process id of a rank.
void unverified_process_test() {
  Host host(2);
  host.begin(Operation::all_reduce, kCount, true);
  expect(host.advance(), "an offer");
  host.of(1).region.token ^= 1;
  while (host.advance()) {
  }
  for (int rank = 0; rank < 2; ++rank)
    expect(host.of(rank).region.reaches == shared::SharedMemoryRegion::Reach::not_all,
           "reads another process");
}
const Test kUnverifiedProcess{"a process without the token is not read", unverified_process_test};

// An unreadable page simulates a device's memory.
void unreadable_test() {
  const size_t bytes =
      kCount * sizeof(float) / os::page_bytes() * os::page_bytes() + os::page_bytes();
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const at = static_cast<std::byte*>(memory);
  expect(memory != MAP_FAILED && os::is_readable(at, bytes), "memory");
  expect(mprotect(at + bytes - os::page_bytes(), os::page_bytes(), PROT_NONE) == 0, "mprotect");
  expect(!os::is_readable(at, bytes) && os::is_readable(at, bytes - os::page_bytes()),
         "is_readable");
  std::vector<std::byte> into(bytes);
  const auto address = reinterpret_cast<uintptr_t>(at);
  expect(!os::read_process(getpid(), address, into.data(), bytes), "read beyond the end");
  expect(os::read_process(getpid(), address, into.data(), bytes - os::page_bytes()), "read");
  for (const bool output : {false, true}) {
    Host host(2);
    until_pulled(host);
    host.begin(Operation::all_reduce, kCount, true);
    std::byte* const page = at + bytes - kCount * sizeof(float);
    shared::SharedJob& job = host.of(1).job;
    if (output)
      job.output = page;
    else
      job.input = page;
    for (int step = 0; step < 2; ++step) expect(host.advance(), "an offer, and what all offer");
    for (int rank = 0; rank < 2; ++rank)
      expect(host.of(rank).call->access_mode() == shared::AccessMode::staged,
             "would read an unreadable page");
  }
  munmap(memory, bytes);
}
const Test kUnreadable{"an unreadable array is not read", unreadable_test};

// It aborts before its offer is answered, during its sum, after it, and when its piece is
// collected. Its next call has another epoch, whose flags are ahead of those that this call waits
// for.
void left_test() {
  for (const int steps : {1, 4, 7, 8}) {
    Host host(2);
    until_pulled(host);
    host.begin(Operation::all_reduce, kCount, true);
    for (int i = 0; i < steps; ++i) expect(host.advance(), "a step");
    Rank& gone = host.of(0);
    gone.call.reset();
    std::ranges::fill(gone.input, 0.0F);
    ++gone.header.epoch;
    gone.region.begin(gone.header);
    gone.call.emplace(gone.engine, gone.region, gone.job, gone.header);
    shared::SharedCall& late = *host.of(1).call;
    while (!late.done() && late.advance()) {
    }
    expect(!late.done(), "takes the other's leftover for a result");
    expect_equal(late.receiving_from(), 0, "the rank that it waits for");
  }
}
const Test kLeft{"an aborted rank is not taken for a finished one", left_test};

}  // namespace
