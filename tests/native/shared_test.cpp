// The shared_memory strategy through whole groups: every verb at sizes about its thresholds, in
// place and not, sums in rank order, disagreements of every kind, and ranks that are late or die.
#include <cmath>
#include <latch>
#include <numeric>
#include <vector>

#include "core/errors.h"
#include "group/group.h"
#include "harness.h"
#include "ranks.h"
#include "shared/segment.h"

using namespace pycomm;
using namespace std::chrono_literals;
using ranks::Array;
using ranks::element;

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
int wanted(const group::Call& call, int rank, int size, size_t i) {
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

void run_once(group::Group& group, group::Call call) {
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

void verbs_test() {
  for (const std::string& by : kShared)
    for (const int size : {2, 3, 4})
      ranks::run_groups(size, by, [](group::Group& group) {
        for (const size_t count : kCounts)
          for (const Operation operation : kVerbs)
            run_once(group, {.operation = operation, .count = count, .peer = group.size() - 1});
      });
}
const Test kVerbsTest{"every verb at every threshold", verbs_test};

// The sum must be that of ranks 0, 1, 2, 3 in this order, at every size and at every place: with
// these summands each other order rounds differently.
void order_test() {
  constexpr int kSize = 4;
  const std::array<float, kSize> summands{1e8F, 3.0F, -1e8F, 1.25F};
  float truth = summands[0];
  for (int i = 1; i < kSize; ++i) truth += summands[static_cast<size_t>(i)];
  for (const bool reproducible : {false, true}) {
    ranks::World world{.size = kSize, .transport = "local"};
    ranks::run(kSize, [&](int rank) {
      const auto group = world.join(rank, reproducible);
      for (const size_t count : {1, 12, 4000, 5000, 200'000}) {
        std::vector<float> x(count, summands[static_cast<size_t>(rank)]);
        group->run({.operation = Operation::all_reduce,
                    .dtype = Dtype::float32,
                    .input = x.data(),
                    .output = x.data(),
                    .count = count});
        for (const float value : x) expect_equal(value, truth, "a sum in rank order");
      }
    });
    world.name += "again";
  }
}
const Test kOrder{"sums are in rank order, whatever the size", order_test};

// 16-bit floats are rounded once: 2048 + 1 + 1 is 2050 in float32, and 2048 if rounded twice.
void half_test() {
  ranks::run_groups(3, "local", [](group::Group& group) {
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
}
const Test kHalf{"16-bit sums are rounded once", half_test};

// Ranks disagree in every way, and the group continues: within the strategy (the signature), across
// strategies (the page with the call of each rank), tiny and large.
void disagreement_test() {
  const auto reduce = [](size_t count, Algorithm algorithm = Algorithm::shared_memory) {
    return group::Call{.operation = Operation::all_reduce,
                       .dtype = Dtype::float32,
                       .count = count,
                       .algorithm = algorithm};
  };
  const std::vector<std::pair<group::Call, group::Call>> pairs{
      {reduce(1), reduce(2)},
      {reduce(100'000), reduce(100'001)},
      {reduce(1), reduce(100'000)},
      {reduce(500), reduce(500, Algorithm::ring)},
      {reduce(500), {.operation = Operation::barrier}},
      {reduce(500), {.operation = Operation::barrier, .algorithm = Algorithm::direct}},
      {reduce(500), {.operation = Operation::all_gather, .dtype = Dtype::float32, .count = 500}},
  };
  for (const std::string& by : kShared)
    ranks::run_groups(3, by, [&](group::Group& group) {
      for (const auto& [first, second] : pairs)
        for (int odd = 0; odd < 3; ++odd) {
          group::Call call = group.rank() == odd ? second : first;
          Array array(Dtype::float32, 3 * std::max<size_t>(call.count, 1));
          array.fill([&](size_t i) { return element(group.rank(), i); });
          const Array before = array;
          call.input = call.output = array.data();
          const auto ending = ranks::ending_of([&] { group.run(call); });
          expect(ending.is(ErrorKind::mismatch), "not a mismatch: " + ending.text());
          expect(array == before, "an array has changed");
          run_once(group, {.operation = Operation::all_reduce, .count = 70'000});
        }
    });
}
const Test kDisagreement{"a disagreement changes nothing, and the group continues",
                         disagreement_test};

// One rank waits for data of a root on which all others agreed; they have continued.
void one_way_test() {
  for (const std::string& by : kShared)
    for (const Operation operation : {Operation::scatter, Operation::broadcast}) {
      std::latch gone_on(2);
      ranks::run_groups(3, by, [&](group::Group& group) {
        Array array(Dtype::float32, 30);
        group::Call call{.operation = operation,
                         .dtype = Dtype::float32,
                         .input = array.data(),
                         .output = array.data(),
                         .count = 10};
        const bool odd = group.rank() == 2;
        if (odd) gone_on.wait();
        call.peer = odd ? 1 : 0;
        const auto ending = ranks::ending_of([&] {
          group.run(call);
          group.run({.operation = Operation::broadcast, .count = 0});
          if (!odd) gone_on.count_down();
          group.run({.operation = Operation::barrier});
        });
        expect(ending.is(ErrorKind::mismatch) && ending.says("continued with"), ending.text());
        run_once(group, {.operation = Operation::all_reduce, .count = 70'000});
      });
    }
}
const Test kOneWay{"waiting for a root that has continued ends with an error", one_way_test};

// The others sleep by then; the rank that fills a slot wakes them.
void late_test() {
  ranks::run_groups(3, "shm", [](group::Group& group) {
    for (int late = 0; late < 3; ++late)
      for (const size_t count : {1, 300'000}) {
        const auto until = Clock::now() + 20ms;
        while (group.rank() == late && Clock::now() < until) std::this_thread::yield();
        run_once(group, {.operation = Operation::all_reduce, .count = count});
        run_once(group, {.operation = Operation::broadcast, .count = count, .peer = late});
      }
  });
}
const Test kLate{"a late rank wakes the sleeping ranks", late_test};

void gone_test() {
  for (const std::string& by : kShared) {
    ranks::World world{.size = 3, .transport = by};
    ranks::run(3, [&](int rank) {
      auto group = world.join(rank);
      if (rank == 1) return group.reset();  // leaves cleanly while the others need it
      float x = 1;
      const auto ending = ranks::ending_of([&] {
        group->run({.operation = Operation::all_reduce,
                    .dtype = Dtype::float32,
                    .input = &x,
                    .output = &x,
                    .count = 1});
      });
      expect(ending.is(ErrorKind::peer_lost) && ending.says("rank 1"), ending.text());
    });
    world.name += "again";
  }
}
const Test kGone{"waiting for a rank that left ends with an error", gone_test};

void timeout_test() {
  ranks::run_groups(2, "shm", [](group::Group& group) {
    if (group.rank() == 1) return;
    float x = 1;
    const auto ending = ranks::ending_of([&] {
      group.run({.operation = Operation::all_reduce,
                 .dtype = Dtype::float32,
                 .input = &x,
                 .output = &x,
                 .count = 1,
                 .timeout = 200ms});
    });
    expect(ending.is(ErrorKind::timeout) || ending.is(ErrorKind::peer_lost), ending.text());
  });
}
const Test kTimeout{"a call keeps to its limit", timeout_test};

void after_abort_test() {
  for (const std::string& by : kShared) {
    std::latch called(1);
    ranks::run_groups(2, by, [&](group::Group& group) {
      float x = 1;
      group::Call call{.operation = Operation::all_reduce,
                       .dtype = Dtype::float32,
                       .input = &x,
                       .output = &x,
                       .count = 1};
      if (group.rank() == 1) {
        group.abort("enough is enough");
        call.op = ReduceOp::max;
        const auto ending = ranks::ending_of([&] { group.run(call); });
        expect(ending.is(ErrorKind::group_broken), ending.text());
        return called.count_down();
      }
      called.wait();
      const auto ending = ranks::ending_of([&] { group.run(call); });
      expect(ending.is(ErrorKind::group_broken) && ending.says("enough is enough"), ending.text());
    });
  }
}
const Test kAfterAbort{"a call after an abort is invisible to other ranks", after_abort_test};

}  // namespace
