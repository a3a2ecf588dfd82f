// The choice of an algorithm, and the table behind it.
#include "collectives/choose.h"

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "harness.h"
#include "prove.h"

namespace pycomm {
namespace {

bool folds(const collectives::AlgorithmQuery& question, Algorithm algorithm) {
  std::vector<collectives::Plan> plans;
  for (int rank = 0; rank < question.size; ++rank)
    plans.push_back(collectives::make_plan(
        algorithm, question.operation,
        {.rank = rank, .size = question.size, .count = question.count, .root = 0}));
  const Proof proof = prove(plans, {question.operation, question.count});
  expect_equal(proof.error, std::string(), "proof");
  return proof.folded;
}

const Test kChoice("every choice has a plan, and a fold where one is needed", [] {
  for (const Operation operation :
       {Operation::all_reduce, Operation::broadcast, Operation::all_gather,
        Operation::reduce_scatter, Operation::barrier, Operation::reduce, Operation::gather,
        Operation::scatter, Operation::all_to_all})
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float32, Dtype::uint8})
      for (const int size : {1, 2, 8, 9, 64})
        for (const size_t count : {0, 1, 4096, 4097, 16384, 16385, 1 << 20})
          for (const bool reproducible : {false, true}) {
            const collectives::AlgorithmQuery question{operation, dtype, ReduceOp::avg,
                                                       size,      count, reproducible};
            const bool folded = folds(question, collectives::choose(question));
            if (reproducible || is_half(dtype))
              expect(folded, std::string(name_of(operation)) + " of " + std::to_string(count) +
                                 " on " + std::to_string(size) + " ranks is not folded");
          }
});

const Test kRules("the rules of the choice", [] {
  const auto is = [](const collectives::AlgorithmQuery& question, Algorithm wanted) {
    expect_equal(name_of(collectives::choose(question)), name_of(wanted),
                 std::string(name_of(question.operation)));
  };
  const auto sum = ReduceOp::sum, max = ReduceOp::max;
  is({Operation::all_reduce, Dtype::float32, sum, 8, 4096}, Algorithm::direct);
  is({Operation::all_reduce, Dtype::float32, sum, 9, 4096}, Algorithm::tree);
  is({Operation::all_reduce, Dtype::float32, sum, 8, 4097}, Algorithm::ring);
  is({Operation::all_reduce, Dtype::float32, sum, 9, 4097}, Algorithm::halving);
  is({Operation::all_reduce, Dtype::float32, sum, 9, (1 << 18) + 1}, Algorithm::ring);
  is({Operation::all_reduce, Dtype::float32, sum, 8, 4097, true}, Algorithm::direct_two_phase);
  is({Operation::all_reduce, Dtype::float16, sum, 2, 8193}, Algorithm::direct_two_phase);
  is({Operation::all_reduce, Dtype::float16, max, 2, 8193}, Algorithm::ring);
  is({Operation::all_reduce, Dtype::float32, sum, 1, 1 << 20}, Algorithm::direct);
  is({Operation::broadcast, Dtype::float32, sum, 4, 4096}, Algorithm::tree);
  is({Operation::broadcast, Dtype::float32, sum, 4, 4097}, Algorithm::ring);
  is({Operation::all_gather, Dtype::float32, sum, 8, 4096}, Algorithm::direct);
  is({Operation::all_gather, Dtype::float32, sum, 64, 4096}, Algorithm::halving);
  is({Operation::all_gather, Dtype::float32, sum, 64, 4096, false, true}, Algorithm::ring);
  is({Operation::all_gather, Dtype::float32, sum, 64, 4097}, Algorithm::ring);
  is({Operation::all_gather, Dtype::float32, sum, 4, 4097}, Algorithm::ring);
  is({Operation::reduce_scatter, Dtype::float32, sum, 8, 4096}, Algorithm::direct);
  is({Operation::reduce_scatter, Dtype::float32, sum, 16, 1 << 14}, Algorithm::halving);
  is({Operation::reduce_scatter, Dtype::float32, sum, 16, (1 << 14) + 1}, Algorithm::ring);
  is({Operation::reduce_scatter, Dtype::bfloat16, sum, 64, 1 << 20}, Algorithm::direct);
  is({Operation::reduce, Dtype::float32, sum, 8, 4096}, Algorithm::direct);
  is({Operation::reduce, Dtype::float32, sum, 9, 4096}, Algorithm::tree);
  is({Operation::reduce, Dtype::float32, sum, 2, 4097}, Algorithm::ring);
  is({Operation::reduce, Dtype::bfloat16, sum, 64, 1 << 20}, Algorithm::direct);
  is({Operation::gather, Dtype::float32, sum, 64, 4096}, Algorithm::tree);
  is({Operation::gather, Dtype::float32, sum, 64, 4097}, Algorithm::direct);
  is({Operation::scatter, Dtype::float32, sum, 9, 1}, Algorithm::tree);
  is({Operation::all_to_all, Dtype::float32, sum, 64, 1}, Algorithm::direct);
  is({Operation::barrier, Dtype::uint8, sum, 8, 0}, Algorithm::direct);
  is({Operation::barrier, Dtype::uint8, sum, 9, 0}, Algorithm::halving);
});

// Rings and trees cross between hosts wherever ranks stand; two levels are for several ranks a
// host.
const Test kHosts("ranks that share hosts make two levels", [] {
  const auto sum = ReduceOp::sum;
  const auto two = [](Operation operation, size_t count, int size, int hosts) {
    return collectives::choose({operation, Dtype::float32, sum, size, count, false, false, hosts});
  };
  for (const Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                                    Operation::reduce_scatter}) {
    expect(two(operation, 1 << 20, 4, 2) == Algorithm::hierarchical, "two on each host");
    expect(two(operation, 1 << 20, 4, 4) != Algorithm::hierarchical, "one on each host");
    expect(two(operation, 1 << 20, 4, 1) != Algorithm::hierarchical, "one host");
    expect(two(operation, 1, 4, 2) != Algorithm::hierarchical, "a small array");
  }
  expect(two(Operation::all_gather, 1 << 10, 64, 2) == Algorithm::hierarchical, "middle");
  expect(two(Operation::all_gather, 1 << 20, 64, 2) == Algorithm::ring, "much scratch");
  expect(two(Operation::barrier, 0, 9, 2) == Algorithm::hierarchical, "barrier");
  const collectives::AlgorithmQuery half{
      Operation::all_reduce, Dtype::bfloat16, sum, 4, 1 << 20, false, false, 2};
  expect(collectives::choose(half) == Algorithm::direct_two_phase, "a fold");
});

// With many ranks the chosen algorithm needs few links: 2 log2(size) for each rank. all_to_all and
// a fold are exceptions: they need all links.
const Test kLinks("large groups need few links", [] {
  for (const Operation operation :
       {Operation::all_reduce, Operation::broadcast, Operation::all_gather,
        Operation::reduce_scatter, Operation::barrier, Operation::reduce, Operation::gather,
        Operation::scatter})
    for (const size_t count : {1, 100, 5000, 1 << 20})
      for (const int size : {65, 100, 128}) {
        const collectives::AlgorithmQuery question{operation, Dtype::float32, ReduceOp::sum, size,
                                                   count};
        size_t links = 0;
        for (int rank = 0; rank < size; ++rank) {
          std::set<int> peers;
          for (const collectives::Move& move :
               collectives::make_plan(collectives::choose(question), operation,
                                      {.rank = rank, .size = size, .count = count})
                   .moves)
            if (move.to != collectives::kNoRank && move.to != rank) peers.insert(move.to);
          links += peers.size();
        }
        expect(links <= static_cast<size_t>(2 * 7 * size),
               std::string(name_of(operation)) + " of " + std::to_string(count) + " on " +
                   std::to_string(size) + " ranks: " + std::to_string(links) + " links");
      }
});

const Test kDistance("over a distance larger messages take fewer steps", [] {
  using std::chrono::microseconds;
  const collectives::Thresholds built_in;
  const auto bytes = [&](int size, microseconds round_trip) {
    const auto found = collectives::adapted(built_in, size, round_trip);
    return std::pair(found.small_bytes, found.middle_bytes);
  };
  const std::pair near(built_in.small_bytes, built_in.middle_bytes);
  expect(bytes(2, microseconds(0)) == near, "inside a host");
  expect(bytes(8, microseconds(1000)) == near, "in one building");
  expect(bytes(8, microseconds(100'000)) == std::pair(size_t{1'250'000}, near.second), "few ranks");
  expect(bytes(9, microseconds(100'000)) == std::pair(near.first, size_t{1'250'000}), "many ranks");
  expect_equal(collectives::adapted({.small_bytes = 2 << 20}, 2, microseconds(100'000)).small_bytes,
               size_t{2 << 20}, "a larger measured threshold");
});

const Test kUnsupported("an unsupported pair is rejected with the supported ones", [] {
  const std::string error = expect_throws<Unsupported>([] {
    collectives::make_plan(Algorithm::direct_two_phase, Operation::broadcast,
                           {.rank = 0, .size = 2, .count = 8, .root = 0});
  });
  expect_equal(error,
               std::string("broadcast has no algorithm \"direct_two_phase\"; supported: ring, "
                           "tree, direct, hierarchical"),
               "text");
  const size_t counts[] = {3, 5};
  const collectives::CollectiveShape ragged{.rank = 0, .size = 2, .counts = counts};
  expect_equal(expect_throws<Unsupported>(
                   [&] { collectives::make_plan(Algorithm::tree, Operation::all_gather, ragged); }),
               std::string("all_gather with counts by rank has no algorithm \"tree\"; supported: "
                           "ring, direct"),
               "text");
  expect_throws<InternalError>([] {
    collectives::make_plan(Algorithm::ring, Operation::send,
                           {.rank = 0, .size = 2, .count = 8, .root = 0});
  });
  expect_throws<InternalError>([] {
    collectives::make_plan(Algorithm::automatic, Operation::barrier,
                           {.rank = 0, .size = 2, .count = 0, .root = 0});
  });
  expect_throws<InternalError>([] {
    collectives::make_plan(Algorithm::ring, Operation::broadcast,
                           {.rank = 0, .size = 2, .count = 8, .root = 2});
  });
  expect_throws<InternalError>([] { collectives::choose({.operation = Operation::recv}); });
  expect(collectives::algorithms_for(Operation::send).empty(), "send has no plans");
});

}  // namespace
}  // namespace pycomm
