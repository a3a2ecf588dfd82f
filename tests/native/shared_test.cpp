// The shared_memory strategy through whole groups: every verb at sizes about its thresholds, in
// place and not, sums in rank order, disagreements of every kind, and ranks that are late. Ranks
// that die: shared_death_test.cpp.
#include <array>
#include <latch>
#include <memory>
#include <optional>
#include <vector>

#include "calls.h"
#include "core/errors.h"
#include "group/group.h"
#include "harness.h"
#include "ranks.h"
#include "shared/segment.h"
#include "shared/shared_call.h"
#include "transport/local.h"

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;
using namespace std::chrono_literals;

namespace {

// Elements of float32 about: nothing, a flag's own line, one shot, a slot, all slots and more.
const std::vector<size_t> kCounts{0, 1, 11, 12, 13, 4096, 4097, 65536, 65537, 5 * 65536 + 3};

void run_once(Group& group, Operation operation, size_t count, int root = 0) {
  for (const bool in_place : {false, true})
    run_plain(group, {operation, Algorithm::shared_memory, Dtype::float32, ReduceOp::sum, count,
                      root, in_place, 0});
}

constexpr std::array kVerbs{Operation::all_reduce, Operation::reduce,     Operation::reduce_scatter,
                            Operation::broadcast,  Operation::all_gather, Operation::gather,
                            Operation::scatter,    Operation::all_to_all, Operation::barrier};

const Test kVerbsTest("every verb at every threshold", [] {
  for (const std::string& by : kShared)
    for (const int size : {2, 3, 4})
      run_groups(size, by, [](Group& group) {
        for (const size_t count : kCounts)
          for (const Operation operation : kVerbs)
            run_once(group, operation, count, group.size() - 1);
      });
});

// The sum must be that of ranks 0, 1, 2, 3 in this order, at every size and at every place: with
// these summands each other order rounds differently.
const Test kOrder("sums are in rank order, whatever the size", [] {
  constexpr int kSize = 4;
  const std::array<float, kSize> summands{1e8F, 3.0F, -1e8F, 1.25F};
  float truth = summands[0];
  for (int i = 1; i < kSize; ++i) truth += summands[static_cast<size_t>(i)];
  for (const bool reproducible : {false, true}) {
    World world{.size = kSize, .transport = "local"};
    run(kSize, [&](int rank) {
      const auto group = world.join(rank, reproducible);
      for (const size_t count : {1, 12, 4000, 5000, 200'000}) {
        std::vector<float> x(count, summands[static_cast<size_t>(rank)]);
        group->run(sum_in_place(x));
        for (const float value : x) expect_equal(value, truth, "a sum in rank order");
      }
    });
    world.name += "again";
  }
});

// 16-bit floats are rounded once: 2048 + 1 + 1 is 2050 in float32, and 2048 if rounded twice.
const Test kHalf("16-bit sums are rounded once", [] {
  run_groups(3, "local", [](Group& group) {
    for (const size_t count : {3, 30'000, 300'000}) {
      const uint16_t big = 0x6800, one = 0x3c00, truth = 0x6801;  // 2048, 1, 2050
      std::vector<uint16_t> x(count, group.rank() == 0 ? big : one);
      group.run({.operation = Operation::all_reduce,
                 .dtype = Dtype::float16,
                 .input = x.data(),
                 .output = x.data(),
                 .count = count});
      for (const uint16_t value : x) expect_equal(value, truth, "a sum rounded once");
    }
  });
});

// Ranks disagree in every way, and the group continues: within the strategy (the signature), across
// strategies (the page with the call of each rank), tiny and large.
const Test kDisagreement("a disagreement changes nothing, and the group continues", [] {
  const auto reduce = [](size_t count, Algorithm algorithm = Algorithm::shared_memory) {
    return Call{.operation = Operation::all_reduce,
                .dtype = Dtype::float32,
                .count = count,
                .algorithm = algorithm};
  };
  const std::vector<std::pair<Call, Call>> pairs{
      {reduce(1), reduce(2)},
      {reduce(100'000), reduce(100'001)},
      {reduce(1), reduce(100'000)},
      {reduce(500), reduce(500, Algorithm::ring)},
      {reduce(500), {.operation = Operation::barrier}},
      {reduce(500), {.operation = Operation::barrier, .algorithm = Algorithm::direct}},
      {reduce(500), {.operation = Operation::all_gather, .dtype = Dtype::float32, .count = 500}},
  };
  for (const std::string& by : kShared)
    run_groups(3, by, [&](Group& group) {
      for (const auto& [first, second] : pairs)
        for (int odd = 0; odd < 3; ++odd) {
          Call call = group.rank() == odd ? second : first;
          Array array(Dtype::float32, 3 * std::max<size_t>(call.count, 1));
          array.fill([&](size_t i) { return element(group.rank(), i); });
          const Array before = array;
          call.input = call.output = array.data();
          const auto ending = ending_of([&] { group.run(call); });
          expect(ending.is(ErrorKind::mismatch), "not a mismatch: " + ending.text());
          expect(array == before, "an array has changed");
          run_once(group, Operation::all_reduce, 70'000);
        }
    });
});

// One rank waits for data of a root on which all others agreed; they have continued.
const Test kOneWay("waiting for a root that has continued ends with an error", [] {
  for (const std::string& by : kShared)
    for (const Operation operation : {Operation::scatter, Operation::broadcast}) {
      std::latch gone_on(2);
      run_groups(3, by, [&](Group& group) {
        Array array(Dtype::float32, 30);
        Call call{.operation = operation,
                  .dtype = Dtype::float32,
                  .input = array.data(),
                  .output = array.data(),
                  .count = 10};
        const bool odd = group.rank() == 2;
        if (odd) gone_on.wait();
        call.peer = odd ? 1 : 0;
        ending_of([&] {
          group.run(call);
          group.run({.operation = Operation::broadcast, .count = 0});
          if (!odd) gone_on.count_down();
          group.run({.operation = Operation::barrier});
        }).check(ErrorKind::mismatch, {"continued with"});
        run_once(group, Operation::all_reduce, 70'000);
      });
    }
});

// The others sleep by then; the rank that fills a slot wakes them.
// Outputs past the caches, whose stores bypass them; misaligned, with a last line that is not
// whole.
const Test kLarge("outputs that are larger than the caches", [] {
  constexpr size_t kOutput = (size_t{32} << 20) / sizeof(float) + 7;
  run_groups(2, "local", [](Group& group) {
    for (const Operation operation : {Operation::broadcast, Operation::scatter})
      run_once(group, operation, kOutput);
    for (const Operation operation :
         {Operation::all_gather, Operation::gather, Operation::all_to_all})
      if (!kRaces) run_once(group, operation, kOutput / 2 + 1);  // stores as above
  });
});

// Two ranks on one thread, so that the test controls the order of their steps.
struct Pair {
  struct Rank {
    Rank(int rank, const std::vector<std::shared_ptr<shared::Segment>>& segments)
        : engine(std::vector<std::unique_ptr<transport::Channel>>(2),
                 {.rank = rank, .names = {}, .interrupted = {}}),
          region(segments, {0, 1}, rank) {}
    engine::Engine engine;
    shared::SharedMemoryRegion region;
    engine::Job job{};
    std::vector<std::byte> input{}, output{};
    std::optional<shared::SharedCall> call{};
  };

  void begin(Operation operation, size_t count) {
    for (auto& rank : ranks) {
      rank->call.reset();
      rank->input.assign(2 * count, std::byte(rank == ranks[0] ? 1 : 2));
      rank->output.assign(2 * count, std::byte{3});
      rank->job = {.header = rank->engine.next_header({}),
                   .input = rank->input.data(),
                   .output = rank->output.data(),
                   .element_bytes = 1,
                   .operation = operation,
                   .count = count};
      rank->region.begin(rank->job.header);
      rank->call.emplace(rank->engine, rank->region, rank->job);
    }
  }
  // The chunks that `writer` fills before its peer reads one.
  uint64_t alone(int writer, size_t chunk_bytes) {
    Rank& one = *ranks.at(static_cast<size_t>(writer));
    const uint64_t before = one.region.bytes_sent;
    while (one.call->advance()) {
    }
    return (one.region.bytes_sent - before) / chunk_bytes;
  }
  void end() {
    while (!ranks[0]->call->done() || !ranks[1]->call->done())
      for (auto& rank : ranks)
        if (!rank->call->done()) rank->call->advance();
  }

  std::vector<std::shared_ptr<shared::Segment>> segments = [] {
    std::vector<std::shared_ptr<shared::Segment>> made;
    for (int rank = 0; rank < 2; ++rank) {
      const auto memory = transport::local_memory("pair", rank, sizeof(shared::Segment));
      made.emplace_back(memory, reinterpret_cast<shared::Segment*>(memory.get()));
    }
    return made;
  }();
  std::array<std::unique_ptr<Rank>, 2> ranks{std::make_unique<Rank>(0, segments),
                                             std::make_unique<Rank>(1, segments)};
};

const Test kMeasured("a rank that only writes measures its stores until they are read", [] {
  constexpr size_t kChunks = shared::kSlots;
  for (const Operation operation : {Operation::broadcast, Operation::scatter, Operation::gather}) {
    Pair pair;
    const int writer = operation == Operation::gather ? 1 : 0;
    const size_t chunk = shared::kSlotBytes / (operation == Operation::scatter ? 2 : 1);
    for (const uint64_t expected : {kChunks, size_t{1}, size_t{1}, kChunks}) {
      pair.begin(operation, kChunks * chunk);
      expect_equal(pair.alone(writer, chunk), expected, "chunks before the peer reads one");
      pair.end();
    }
  }
});

const Test kLate("a late rank wakes the sleeping ranks", [] {
  run_groups(3, "shm", [](Group& group) {
    for (int late = 0; late < 3; ++late)
      for (const size_t count : {1, 300'000}) {
        const auto until = Clock::now() + 20ms;
        while (group.rank() == late && Clock::now() < until) std::this_thread::yield();
        run_once(group, Operation::all_reduce, count);
        run_once(group, Operation::broadcast, count, late);
      }
  });
});

const Test kAfterAbort("a call after an abort is invisible to other ranks", [] {
  for (const std::string& by : kShared) {
    std::latch called(1);
    run_groups(2, by, [&](Group& group) {
      float x = 1;
      Call call = sum_in_place({&x, 1});
      if (group.rank() == 1) {
        group.abort("enough is enough");
        call.op = ReduceOp::max;
        ending_of([&] { group.run(call); }).check(ErrorKind::group_broken);
        return called.count_down();
      }
      called.wait();
      ending_of([&] { group.run(call); }).check(ErrorKind::group_broken, {"enough is enough"});
    });
  }
});

}  // namespace
