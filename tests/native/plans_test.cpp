// Every plan against the prover, and its cost against the formula in its file.
#include <bit>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "collectives/choose.h"
#include "collectives/collectives.h"
#include "harness.h"

namespace pycomm {
namespace {

// Sanitizers watch the code, not the plans, and are slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kMaxSize = 24;
#else
constexpr int kMaxSize = 64;
#endif
constexpr size_t kCounts[] = {0, 1, 2, 3, 7, 64, 65, 1000};

// What the comment above a plan promises, for one rank.
struct Cost {
  size_t messages = 0, elements = 0;
  int steps = 0;
};

int log_of(int size) { return static_cast<int>(std::bit_width(static_cast<unsigned>(size - 1))); }

// The children of a node of the binomial tree, and the nodes under it with itself, the slow way.
size_t children_of(int node, int size) {
  size_t children = 0;
  for (int other = 1; other < size; ++other) children += (other & (other - 1)) == node;
  return children;
}

size_t under(int node, int size) {
  size_t nodes = 0;
  for (int other = 0; other < size; ++other) {
    int at = other;
    while (at > node) at &= at - 1;
    nodes += at == node;
  }
  return nodes;
}

Cost ring_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const auto part = [&](int i) { return piece(Space::input, c, size, i).count; };
  const size_t pieces = ring_broadcast_pieces(size, c);
  switch (what.operation) {
    case Operation::all_reduce:
      return {2 * (n - 1), 2 * c - part(rank) - part(rank + 1), 2 * (size - 1)};
    case Operation::broadcast: {
      const bool last = (rank + 1) % size == what.root;
      return {last ? 0 : pieces, last ? 0 : c, static_cast<int>(pieces) + size - 2};
    }
    case Operation::all_gather: {
      const int rounds = size > 2 ? 2 : 1;
      return {static_cast<size_t>(rounds) * (n - 1), (n - 1) * c, rounds * (size - 1)};
    }
    case Operation::reduce_scatter:
      return {n - 1, (n - 1) * c, size - 1};
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
  }
  return {};
}

Cost direct_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const size_t rounds = size > 2 ? 2 : 1, gives = rank != what.root;
  switch (what.operation) {
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      return {n - 1, (n - 1) * c, size - 1};
    case Operation::broadcast:
      return {rank == what.root ? n - 1 : 0, rank == what.root ? (n - 1) * c : 0, size - 1};
    case Operation::all_gather:
      return {rounds * (n - 1), (n - 1) * c, static_cast<int>(rounds) * (size - 1)};
    case Operation::barrier:
      return {n - 1, 0, size - 1};
    case Operation::reduce:
      return {gives, gives * c, size - 1};
    case Operation::gather:
      return {rounds * gives, gives * c, static_cast<int>(rounds) * (size - 1)};
    case Operation::scatter:
      return {rank == what.root ? n - 1 : 0, rank == what.root ? (n - 1) * c : 0, size - 1};
    case Operation::all_to_all:
      return {rounds * (n - 1), (n - 1) * c, static_cast<int>(rounds) * (size - 1)};
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

Cost tree_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const int node = (rank - what.root + size) % size;
  const size_t children = children_of(node, size), below = under(node, size), up = rank != 0;
  switch (what.operation) {
    case Operation::all_reduce:
      return {children + up, (children + up) * c, 2 * log_of(size)};
    case Operation::broadcast:
      return {children, children * c, log_of(size)};
    case Operation::all_gather:
      return {children + up, up * below * c + children * n * c, 2 * log_of(size)};
    case Operation::reduce_scatter:
      return {children + up, up * n * c + (below - 1) * c, 2 * log_of(size)};
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
  }
  return {};
}

Cost owner_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size);
  const size_t own = piece(Space::input, what.count, size, rank).count;
  return {2 * (n - 1), what.count - own + (n - 1) * own, 2 * (size - 1)};
}

Cost cost_of(Algorithm algorithm, int rank, int size, const Case& what) {
  if (size == 1) return {};
  switch (algorithm) {
    case Algorithm::ring:
      return ring_cost(rank, size, what);
    case Algorithm::direct:
      return direct_cost(rank, size, what);
    case Algorithm::tree:
      return tree_cost(rank, size, what);
    case Algorithm::owner:
      return owner_cost(rank, size, what);
    case Algorithm::automatic:
    case Algorithm::halving:
    case Algorithm::hierarchical:
      break;
  }
  return {};
}

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
    if (rank == 0 && what.count >= static_cast<size_t>(size))
      expect_equal(proof.steps, cost.steps, name + ": steps");
    expect(proof.steps <= cost.steps, name + ": more steps than promised");
  }
  if (algorithm == Algorithm::direct || algorithm == Algorithm::owner)
    expect(proof.folded, name + ": not folded in rank order");
}

// Whether there are two arrays that may be one.
bool has_two_arrays(Operation operation) {
  return operation != Operation::broadcast && operation != Operation::barrier &&
         operation != Operation::all_to_all;
}

void expect_all_proven(Operation operation) {
  for (const Algorithm algorithm : algorithms_for(operation))
    for (int size = 1; size <= kMaxSize; ++size)
      for (const size_t count : kCounts)
        for (const bool aliased : {false, true})
          if (!aliased || has_two_arrays(operation))
            expect_proven(algorithm, size, {operation, count, 0, aliased});
}

const Test kAllReduce{"all_reduce is proven", [] { expect_all_proven(Operation::all_reduce); }};
const Test kBroadcast{"broadcast is proven", [] { expect_all_proven(Operation::broadcast); }};
const Test kAllGather{"all_gather is proven", [] { expect_all_proven(Operation::all_gather); }};
const Test kReduceScatter{"reduce_scatter is proven",
                          [] { expect_all_proven(Operation::reduce_scatter); }};
const Test kBarrier{"barrier is proven", [] { expect_all_proven(Operation::barrier); }};
const Test kReduce{"reduce is proven", [] { expect_all_proven(Operation::reduce); }};
const Test kGather{"gather is proven", [] { expect_all_proven(Operation::gather); }};
const Test kScatter{"scatter is proven", [] { expect_all_proven(Operation::scatter); }};
const Test kAllToAll{"all_to_all is proven", [] { expect_all_proven(Operation::all_to_all); }};

void roots_test() {
  for (const Operation operation :
       {Operation::broadcast, Operation::reduce, Operation::gather, Operation::scatter})
    for (const Algorithm algorithm : algorithms_for(operation))
      for (int size = 1; size <= 17; ++size)
        for (int root = 0; root < size; ++root)
          for (const bool aliased : {false, true})
            if (!aliased || has_two_arrays(operation))
              expect_proven(algorithm, size, {operation, 7, root, aliased});
}
const Test kRoots{"rooted operations are proven for every root", roots_test};

// Parts of every length, also none: rank r gives rank q (r + 2 q) % 5 elements, and to all of them
// (3 r) % 7.
void counts_test() {
  for (int size = 1; size <= 17; ++size) {
    Case gather{Operation::all_gather}, exchange{Operation::all_to_all};
    for (int r = 0; r < size; ++r) {
      gather.counts.push_back(static_cast<size_t>(3 * r % 7));
      for (int q = 0; q < size; ++q)
        exchange.counts.push_back(static_cast<size_t>((r + 2 * q) % 5));
    }
    for (const Algorithm algorithm : algorithms_for(Operation::all_gather, true))
      for (const bool aliased : {false, true}) {
        gather.aliased = aliased;
        const Proof proof = prove(plans_of(algorithm, size, gather), gather);
        expect_equal(proof.error, std::string(), title(algorithm, size, gather));
      }
    const Proof proof = prove(plans_of(Algorithm::direct, size, exchange), exchange);
    expect_equal(proof.error, std::string(), title(Algorithm::direct, size, exchange));
  }
}
const Test kRagged{"all_gather and all_to_all are proven with counts by rank", counts_test};

void large_test() {
  for (const Operation operation : {Operation::all_reduce, Operation::broadcast,
                                    Operation::all_gather, Operation::reduce_scatter})
    for (const Algorithm algorithm : algorithms_for(operation))
      for (const int size : {2, 3, 8, 13})
        for (const size_t count : {size_t{50'001}, size_t{1'000'003}, (size_t{1} << 32) + 5})
          expect_proven(algorithm, size,
                        {operation, count, operation == Operation::broadcast ? size / 2 : 0});
}
const Test kLarge{"large arrays are proven, past 2^32 elements", large_test};

void broadcast_is_cut() {
  expect_equal(ring_broadcast_pieces(3, 0), size_t{1}, "nothing to cut");
  expect_equal(ring_broadcast_pieces(2, 1 << 30), size_t{1}, "nobody to pass it on to");
  expect_equal(ring_broadcast_pieces(10, 4 * 16384), size_t{4}, "no piece is small");
  expect_equal(ring_broadcast_pieces(10, 1 << 30), size_t{64}, "eight for each of eight hops");
}
const Test kPieces{"a ring broadcast is cut for its hops", broadcast_is_cut};

}  // namespace
}  // namespace pycomm
