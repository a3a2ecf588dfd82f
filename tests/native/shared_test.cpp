// The shared_memory strategy through whole groups: every verb at sizes about its thresholds, in
// place and not, sums in rank order, disagreements of every kind, and ranks that are late or die.
#include <latch>
#include <vector>

#include "core/errors.h"
#include "group/group.h"
#include "harness.h"
#include "ranks.h"
#include "shared/segment.h"

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;
using namespace std::chrono_literals;

namespace {

const std::vector<std::string> kShared{"local", "shm"};

// Elements of float32 about: nothing, a flag's own line, one shot, a slot, all slots and more.
const std::vector<size_t> kCounts{0, 1, 11, 12, 13, 4096, 4097, 65536, 65537, 5 * 65536 + 3};

size_t rows_in(Operation operation, int size) {
  switch (operation) {
    case Operation::reduce_scatter:
    case Operation::scatter:
    case Operation::all_to_all:
      return static_cast<size_t>(size);
    case Operation::all_reduce:
    case Operation::reduce:
    case Operation::broadcast:
    case Operation::all_gather:
    case Operation::gather:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return 1;
}

size_t rows_out(Operation operation, int size) {
  const bool gathers = operation == Operation::all_gather || operation == Operation::gather ||
                       operation == Operation::all_to_all;
  return gathers ? static_cast<size_t>(size) : 1;
}

int sum_of(int size, size_t i) {
  int sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += element(rank, i);
  return sum;
}

// Element `i` of what `rank` gets, or -1 where its output stays as it was.
int wanted(const Call& call, int rank, int size, size_t i) {
  const size_t n = call.count, mine = static_cast<size_t>(rank) * n;
  switch (call.operation) {
    case Operation::all_reduce:
      return sum_of(size, i);
    case Operation::reduce:
      return rank == call.peer ? sum_of(size, i) : -1;
    case Operation::reduce_scatter:
      return sum_of(size, mine + i);
    case Operation::broadcast:
      return element(call.peer, i);
    case Operation::all_gather:
      return element(static_cast<int>(i / n), i % n);
    case Operation::gather:
      return rank == call.peer ? element(static_cast<int>(i / n), i % n) : -1;
    case Operation::scatter:
      return element(call.peer, mine + i);
    case Operation::all_to_all:
      return element(static_cast<int>(i / n), mine + i % n);
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return -1;
}

void run_once(Group& group, Call call) {
  const int rank = group.rank(), size = group.size();
  call.dtype = Dtype::float32;
  call.algorithm = Algorithm::shared_memory;
  Array input(call.dtype, rows_in(call.operation, size) * call.count);
  Array output(call.dtype, rows_out(call.operation, size) * call.count);
  input.fill([&](size_t i) { return element(rank, i); });
  if (call.operation == Operation::broadcast && rank == call.peer)
    output.fill([&](size_t i) { return element(rank, i); });
  Array truth = output;
  if (call.count > 0 && wanted(call, rank, size, 0) >= 0)
    for (size_t row = 0; row < rows_out(call.operation, size); ++row)
      truth.fill(row * call.count, call.count,
                 [&](size_t i) { return wanted(call, rank, size, row * call.count + i); });
  const Array before = input;
  call.input = input.data();
  call.output = output.data();
  group.run(call);
  expect(output == truth, std::string(name_of(call.operation)) + " of " +
                              std::to_string(call.count) + " elements, " + std::to_string(size) +
                              " ranks, root " + std::to_string(call.peer));
  expect(input == before, "the input has changed");
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
            run_once(group, {.operation = operation, .count = count, .peer = group.size() - 1});
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
          run_once(group, {.operation = Operation::all_reduce, .count = 70'000});
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
        run_once(group, {.operation = Operation::all_reduce, .count = 70'000});
      });
    }
});

// The others sleep by then; the rank that fills a slot wakes them.
const Test kLate("a late rank wakes the sleeping ranks", [] {
  run_groups(3, "shm", [](Group& group) {
    for (int late = 0; late < 3; ++late)
      for (const size_t count : {1, 300'000}) {
        const auto until = Clock::now() + 20ms;
        while (group.rank() == late && Clock::now() < until) std::this_thread::yield();
        run_once(group, {.operation = Operation::all_reduce, .count = count});
        run_once(group, {.operation = Operation::broadcast, .count = count, .peer = late});
      }
  });
});

const Test kGone("waiting for a rank that left ends with an error", [] {
  for (const std::string& by : kShared) {
    World world{.size = 3, .transport = by};
    run(3, [&](int rank) {
      auto group = world.join(rank);
      if (rank == 1) return group.reset();  // leaves cleanly while the others need it
      float x = 1;
      ending_of([&] { group->run(sum_in_place({&x, 1})); }).check(ErrorKind::peer_lost, {"rank 1"});
    });
    world.name += "again";
  }
});

const Test kTimeout("a call keeps to its limit", [] {
  run_groups(2, "shm", [](Group& group) {
    if (group.rank() == 1) return;
    float x = 1;
    const auto ending = ending_of([&] {
      Call call = sum_in_place({&x, 1});
      call.timeout = 200ms;
      group.run(call);
    });
    expect(ending.is(ErrorKind::timeout) || ending.is(ErrorKind::peer_lost), ending.text());
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
