// A group of ranks without failures: every verb by every algorithm over every transport, against a
// plain model; asynchronous calls, split. Messages are in messages_test.cpp, failures in
// engine_test.cpp.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "calls.h"
#include "collectives/choose.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;

constexpr Operation kPlanned[] = {
    Operation::all_reduce, Operation::broadcast, Operation::all_gather, Operation::reduce_scatter,
    Operation::reduce,     Operation::gather,    Operation::scatter,    Operation::all_to_all};

void run_cases(Group& group) {
  int call = 0;
  for (const Operation operation : kPlanned)
    for (const Algorithm algorithm : collectives::algorithms_for(operation))
      for (const size_t count : {0, 1, 7, 1000, 70'000 / (kSlowdown > 1 ? 3 : 1)})
        for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::int64, Dtype::uint8}) {
          if (count > 1000 && dtype != Dtype::float32) continue;
          if (kSlowdown > 1 && (dtype == Dtype::int64 || count == 7)) continue;
          Case c{operation, algorithm, dtype, ReduceOp::sum, count, 0, false, 0};
          const int roots = c.rooted() && (kSlowdown == 1 || count <= 1000) ? group.size() : 1;
          if (call % 2 == 1) c.op = ReduceOp::max;
          for (c.root = 0; c.root < roots; ++c.root)
            for (const bool in_place : {false, true}) {
              c.in_place = in_place;
              c.call = ++call;
              run_case(group, c);
            }
        }
}

const ByTransport kVerbs("every verb by every algorithm is right", [](const std::string& by) {
  const bool slow = kSlowdown > 1;
  const int most = slow && by != "local" ? 3 : 5;
  for (int size = 1; size <= most; size += slow ? 2 : 1) run_groups(size, by, run_cases);
});

const Test kBlocks("a call with too much scratch runs in blocks", [] {
  constexpr size_t kCount = 2'500'001;  // 3 ranks: from 10 MB of scratch on
  std::vector<std::pair<Operation, Algorithm>> verbs{
      {Operation::all_reduce, Algorithm::direct_two_phase},
      {Operation::reduce_scatter, Algorithm::ring}};
  if (kSlowdown == 1) {
    verbs.push_back({Operation::all_reduce, Algorithm::tree});
    verbs.push_back({Operation::all_reduce, Algorithm::direct});
    verbs.push_back({Operation::reduce_scatter, Algorithm::direct});
    for (const Algorithm algorithm : collectives::algorithms_for(Operation::reduce))
      verbs.push_back({Operation::reduce, algorithm});
  }
  run_groups(3, "local", [&](Group& group) {
    bool in_place = false;
    for (const auto& [operation, algorithm] : verbs) {
      in_place = !in_place;
      run_plain(group,
                {operation, algorithm, Dtype::float32, ReduceOp::sum, kCount, 0, in_place, 1});
    }
  });
});

// Numbers whose sum depends on the order of the additions.
Array random_numbers(Dtype dtype, size_t count, uint32_t seed) {
  Array array(dtype, count);
  std::mt19937 random(seed);
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(
        std::ldexp(static_cast<float>(random()) - 2e9f, -static_cast<int>(random() % 40)));
    if (dtype == Dtype::float32) std::memcpy(array.at(i), &bits, 4);
    if (dtype == Dtype::bfloat16)
      std::memcpy(array.at(i), reinterpret_cast<const char*>(&bits) + 2, 2);
  }
  return array;
}

const Test kSameBits("the same bits on every rank, by every transport", [] {
  constexpr size_t kCount = 30'011;
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16})
    for (const Algorithm algorithm : collectives::algorithms_for(Operation::all_reduce))
      for (const int size : {2, 4, 5}) {
        std::vector<Array> results(3 * static_cast<size_t>(size), Array(dtype, kCount));
        for (size_t t = 0; t < 3; ++t)
          run_groups(size, kTransports[t], [&](Group& group) {
            Array& array =
                results[t * static_cast<size_t>(size) + static_cast<size_t>(group.rank())];
            array = random_numbers(dtype, kCount, static_cast<uint32_t>(group.rank()));
            group.run(sum_in_place(array, algorithm));
          });
        for (const Array& result : results)
          expect(result == results[0], std::string(name_of(algorithm)) + ": bits differ");
      }
});

Case random_case(std::mt19937& random, int size, int call) {
  const Operation operation = kPlanned[random() % std::size(kPlanned)];
  const auto algorithms = collectives::algorithms_for(operation);
  constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::int64, Dtype::uint8};
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min};
  const size_t count = random() % 16 == 0 ? random() % 60'000 : random() % 1000;
  return {operation,
          algorithms[random() % algorithms.size()],
          kDtypes[random() % 4],
          kOps[random() % 3],
          count,
          static_cast<int>(random() % static_cast<uint32_t>(size)),
          random() % 2 == 0,
          call};
}

const ByGroups kSoak("3,000 calls of any kind in a row", 4, [](Group& group) {
  std::mt19937 random(7);
  for (int call = 0; call < 3000 / kSlowdown; ++call)
    run_case(group, random_case(random, group.size(), call));
});

const ByTransport kAsync(
    "asynchronous calls run in order, between synchronous ones", [](const std::string& by) {
      run_groups(3, by, [](Group& group) {
        std::mt19937 random(3);
        for (int round = 0; round < 5; ++round) {
          std::vector<Case> cases;
          std::vector<std::unique_ptr<Arrays>> arrays;
          std::vector<std::shared_ptr<Work>> works;
          std::vector<int> ends;  // written by the worker, read when it is idle
          for (int i = 0; i < 20; ++i) {
            cases.push_back(random_case(random, group.size(), i));
            arrays.push_back(std::make_unique<Arrays>(cases.back(), group.rank(), group.size()));
            works.push_back(group.start(arrays.back()->call, [&ends, i](std::exception_ptr error) {
              ends.push_back(error ? -1 : i);
            }));
          }
          if (round % 2 == 0) works[13]->wait();
          const Case last = random_case(random, group.size(), 20);
          Arrays lasting(last, group.rank(), group.size());
          group.run(lasting.call);
          expect_result(last, lasting, group.rank(), group.size());
          for (size_t i = 0; i < cases.size(); ++i) {
            expect(works[i]->done() && !works[i]->error(),
                   "a call before a synchronous one is over");
            works[i]->wait();
            expect_result(cases[i], *arrays[i], group.rank(), group.size());
            expect_equal(ends[i], static_cast<int>(i), "order of the calls");
          }
        }
      });
    });

const ByGroups kSplit("split by color and key; the parent stays usable", 5, [](Group& group) {
  const int rank = group.rank();
  const auto part = group.split(rank == 2 ? -1 : rank % 2, -rank);
  expect_equal(part == nullptr, rank == 2, "the rank without a group");
  const Case c{
      Operation::all_reduce, Algorithm::ring, Dtype::float32, ReduceOp::sum, 999, 0, false, 1};
  if (part) {
    const std::vector<int> members = rank % 2 == 0 ? std::vector{4, 0} : std::vector{3, 1};
    expect(part->info().ranks == members && part->size() == 2, "members of the subgroup");
    expect_equal(members[static_cast<size_t>(part->rank())], rank, "rank in the subgroup");
    run_case(*part, c);
    const auto alone = part->split(part->rank(), 0);
    expect(alone->size() == 1 && alone->info().ranks == std::vector{rank}, "a group of one");
    run_case(*alone, c);
  }
  run_case(group, c);
  const auto all = group.split(7, 0);
  run_case(*all, c);
  run_case(group, c);
});

const ByGroups kTogether("no other call runs between those of run_together", 2, [](Group& group) {
  const Call barrier{.operation = Operation::barrier};
  const Case sum{
      Operation::all_reduce, Algorithm::ring, Dtype::int32, ReduceOp::sum, 100, 0, false, 1};
  const auto earlier = group.start(barrier);
  const auto refuses = [&](const std::function<void()>& call) {
    auto refused =
        std::async(std::launch::async, [&] { (void)expect_throws<InvalidArgument>(call); });
    refused.get();
  };
  group.run_together(
      [&] {
        expect(earlier->done(), "it waits for earlier calls");
        run_case(group, sum);
        refuses([&] { group.run(barrier); });
        refuses([&] { (void)group.start(barrier); });
        run_case(group, sum);
      },
      std::chrono::seconds(60));
  group.start(barrier)->wait();  // in turns again
  run_case(group, sum);
});

const ByGroups kThreads("two groups of the same ranks serve two threads at once", 3,
                        [](Group& group) {
                          const auto left = group.split(0, 0), right = group.split(0, 0);
                          run(2, [&](int thread) {
                            std::mt19937 random(static_cast<uint32_t>(thread));
                            for (int i = 0; i < 50; ++i)
                              run_case(thread == 0 ? *left : *right, random_case(random, 3, i));
                          });
                        });

const Test kRefuses("wrong arguments are rejected before any transfer", [] {
  run_groups(2, "local", [](Group& group) {
    Array array(Dtype::float32, 4);
    const auto refused = [&]<typename Wanted>(Wanted*, Call call) {
      call.dtype = call.dtype == Dtype::uint8 ? Dtype::float32 : call.dtype;
      expect_throws<Wanted>([&] { group.run(call); });
      expect_throws<Wanted>([&] { group.start(call, {}); });
    };
    InvalidArgument* invalid = nullptr;
    Unsupported* unsupported = nullptr;
    std::byte* data = array.data();
    refused(invalid, {.operation = Operation::all_reduce, .count = 4});
    refused(invalid, {.operation = Operation::broadcast, .output = data, .count = 4, .peer = 2});
    refused(invalid, {.operation = Operation::send, .input = data, .count = 4, .peer = -1});
    refused(invalid,
            {.operation = Operation::recv, .output = data, .count = 4, .peer = group.rank()});
    refused(
        invalid,
        {.operation = Operation::all_gather, .input = data, .output = data, .count = SIZE_MAX / 4});
    refused(unsupported, {.operation = Operation::all_reduce,
                          .op = ReduceOp::band,
                          .input = data,
                          .output = data,
                          .count = 4});
    refused(unsupported, {.operation = Operation::all_gather,
                          .input = data,
                          .output = data,
                          .count = 1,
                          .algorithm = Algorithm::direct_two_phase});
    run_case(group, {Operation::all_reduce, Algorithm::ring, Dtype::float32, ReduceOp::sum, 4, 0,
                     false, 0});
  });
});

// The wanted bytes are from Python: hmac.new(b"a shared secret", label + name, "sha256").
const Test kSubgroupSecret("the secret of a subgroup is derived with its own label", [] {
  constexpr std::array<uint8_t, 4> kFirst{0xa8, 0x95, 0x9f, 0x8f};
  const std::string got = subgroup_secret("a shared secret", "world/0.1");
  expect_equal(got.size(), size_t{32}, "bytes");
  for (size_t i = 0; i < kFirst.size(); ++i)
    expect_equal(int{static_cast<uint8_t>(got[i])}, int{kFirst[i]}, "byte");
  expect(got != subgroup_secret("a shared secret", "world/0.0"), "names differ");
});

}  // namespace
