// Every plan against the prover, and its cost against the formula in its file.
#include <string>
#include <utility>

#include "cases.h"
#include "collectives/choose.h"
#include "collectives/collectives.h"
#include "costs.h"
#include "harness.h"

namespace pycomm {
namespace {

// Sanitizers and the emulator of aarch64 check the code, not the plans, and are slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__aarch64__)
constexpr int kMaxSize = 24;
#else
constexpr int kMaxSize = 64;
#endif
constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 64, 65, 1000};

void expect_proven(Algorithm algorithm, int size, const Case& what) {
  const std::string name = title(algorithm, size, what);
  const Proof proof = prove(plans_of(algorithm, size, what), what);
  expect(proof.error.empty(), name + ": " + proof.error);
  for (int rank = 0; rank < size; ++rank) {
    const Cost cost = cost_of(algorithm, rank, size, what);
    const auto r = static_cast<size_t>(rank);
    const std::string who = name + ", rank " + std::to_string(rank);
    expect_equal(proof.messages[r], cost.messages, who + ": messages");
    expect_equal(proof.elements[r], cost.elements, who + ": elements");
    // A send without elements waits for nothing, so it can be early.
    if (rank == 0 && !cost.bound && what.count >= static_cast<size_t>(size))
      expect_equal(proof.steps, cost.steps, name + ": steps");
    expect(proof.steps <= cost.steps, name + ": more steps than promised");
  }
  if (algorithm == Algorithm::direct || algorithm == Algorithm::direct_two_phase)
    expect(proof.folded, name + ": not folded in rank order");
}

// Whether there are two arrays that may be one.
bool has_two_arrays(Operation operation) {
  return operation != Operation::broadcast && operation != Operation::barrier &&
         operation != Operation::all_to_all;
}

void expect_all_proven(Operation operation) {
  for (const Algorithm algorithm : collectives::algorithms_for(operation))
    for (int size = 1; size <= kMaxSize; ++size)
      for (const size_t count : kCounts)
        for (const bool aliased : {false, true})
          if (!aliased || has_two_arrays(operation))
            expect_proven(algorithm, size, {operation, count, 0, aliased});
}

const Test kAllReduce("all_reduce is proven", [] { expect_all_proven(Operation::all_reduce); });
const Test kBroadcast("broadcast is proven", [] { expect_all_proven(Operation::broadcast); });
const Test kAllGather("all_gather is proven", [] { expect_all_proven(Operation::all_gather); });
const Test kReduceScatter("reduce_scatter is proven",
                          [] { expect_all_proven(Operation::reduce_scatter); });
const Test kBarrier("barrier is proven", [] { expect_all_proven(Operation::barrier); });
const Test kReduce("reduce is proven", [] { expect_all_proven(Operation::reduce); });
const Test kGather("gather is proven", [] { expect_all_proven(Operation::gather); });
const Test kScatter("scatter is proven", [] { expect_all_proven(Operation::scatter); });
const Test kAllToAll("all_to_all is proven", [] { expect_all_proven(Operation::all_to_all); });

const Test kRoots("rooted operations are proven for every root", [] {
  for (const Operation operation :
       {Operation::broadcast, Operation::reduce, Operation::gather, Operation::scatter})
    for (const Algorithm algorithm : collectives::algorithms_for(operation))
      for (int size = 1; size <= 17; ++size)
        for (int root = 0; root < size; ++root)
          for (const bool aliased : {false, true})
            if (!aliased || has_two_arrays(operation))
              expect_proven(algorithm, size, {operation, 7, root, aliased});
});

// Parts of every length, also none: rank r gives rank q (r + 2 q) % 5 elements, and to all of them
// (3 r) % 7.
const Test kRagged("all_gather and all_to_all are proven with counts by rank", [] {
  for (int size = 1; size <= 17; ++size) {
    Case gather{Operation::all_gather}, exchange{Operation::all_to_all};
    for (int r = 0; r < size; ++r) {
      gather.counts.push_back(static_cast<size_t>(3 * r % 7));
      for (int q = 0; q < size; ++q)
        exchange.counts.push_back(static_cast<size_t>((r + 2 * q) % 5));
    }
    for (const Algorithm algorithm : collectives::algorithms_for(Operation::all_gather, true))
      for (const bool aliased : {false, true}) {
        gather.aliased = aliased;
        const Proof proof = prove(plans_of(algorithm, size, gather), gather);
        expect_equal(proof.error, std::string(), title(algorithm, size, gather));
      }
    const Proof proof = prove(plans_of(Algorithm::direct, size, exchange), exchange);
    expect_equal(proof.error, std::string(), title(Algorithm::direct, size, exchange));
  }
});

const Test kLarge("large arrays are proven, past 2^32 elements", [] {
  for (const Operation operation :
       {Operation::all_reduce, Operation::broadcast, Operation::all_gather,
        Operation::reduce_scatter, Operation::reduce})
    for (const Algorithm algorithm : collectives::algorithms_for(operation))
      for (const int size : {2, 3, 5, 8, 13, 40})
        for (const size_t count : {size_t{50'001}, size_t{1'000'003}, (size_t{1} << 32) + 5})
          expect_proven(
              algorithm, size,
              {operation, count,
               operation == Operation::broadcast || operation == Operation::reduce ? size / 2 : 0});
});

// Of arrays of whole 16 bytes in float32, and of 128 bytes in any dtype if they are long.
const Test kAlignedPieces("pieces of long arrays are aligned", [] {
  for (const auto& [count, grain] : {std::pair<size_t, size_t>{25'557'032, 128},
                                     {size_t{128} * 16 * 64, 128},
                                     {size_t{64} * 64, 4},
                                     {4000, 1}})
    for (int size = 1; size <= 64; ++size) {
      size_t end = 0;
      for (int i = 0; i < size; ++i) {
        const auto piece = collectives::piece(collectives::Space::input, count, size, i);
        const std::string name =
            std::to_string(count) + " in " + std::to_string(size) + ", " + std::to_string(i);
        expect_equal(piece.begin, end, name + ": where the one before ends");
        expect_equal(piece.begin % grain, size_t{0}, name + ": aligned");
        const size_t mean = count / static_cast<size_t>(size);
        expect(piece.count <= mean + mean / 16 + 1, name + ": not much longer than others");
        end += piece.count;
      }
      expect_equal(end, count, "nothing is left");
    }
});

const Test kPieces("a ring broadcast is split for its hops", [] {
  expect_equal(collectives::ring_broadcast_pieces(3, 0), size_t{1}, "nothing to cut");
  expect_equal(collectives::ring_broadcast_pieces(2, 1 << 30), size_t{1}, "no rank to forward to");
  expect_equal(collectives::ring_broadcast_pieces(10, 4 * 16384), size_t{4}, "no piece is small");
  expect_equal(collectives::ring_broadcast_pieces(10, 1 << 30), size_t{64},
               "eight for each of eight hops");
});

}  // namespace
}  // namespace pycomm
