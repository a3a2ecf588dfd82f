// The selection rules and the table of plans.
#include "collectives/choose.h"

#include <algorithm>
#include <array>
#include <string>

#include "collectives/collectives.h"
#include "core/errors.h"

namespace pycomm::collectives {
namespace {

// Up to this many ranks one step with size - 1 messages is assumed to be faster than the 2
// log2(size) steps of a tree with one message each.
constexpr int kFewRanks = 8;

// 100 Mbit/s; few links between hosts are slower. On a slower link, one step of more than two ranks
// may take longer than a ring for messages just below the threshold.
constexpr double kBytesPerUs = 12.5;

struct Entry {
  Operation operation;
  Algorithm algorithm;
  Plan (*plan)(const CollectiveShape&);
  bool supports_counts = false;
};

template <Plan (*kPlan)(int, int, size_t)>
Plan rootless(const CollectiveShape& at) {
  return kPlan(at.rank, at.size, at.count);
}

template <Plan (*kPlan)(int, int, size_t, int)>
Plan rooted(const CollectiveShape& at) {
  return kPlan(at.rank, at.size, at.count, at.root);
}

template <Plan (*kPlan)(int, int)>
Plan countless(const CollectiveShape& at) {
  return kPlan(at.rank, at.size);
}

constexpr std::array<Entry, 32> kPlans{{
    {Operation::all_reduce, Algorithm::ring, rootless<ring_all_reduce>},
    {Operation::all_reduce, Algorithm::tree, rootless<tree_all_reduce>},
    {Operation::all_reduce, Algorithm::direct, rootless<direct_all_reduce>},
    {Operation::all_reduce, Algorithm::direct_two_phase, rootless<direct_two_phase_all_reduce>},
    {Operation::all_reduce, Algorithm::halving, rootless<halving_all_reduce>},
    {Operation::broadcast, Algorithm::ring, rooted<ring_broadcast>},
    {Operation::broadcast, Algorithm::tree, rooted<tree_broadcast>},
    {Operation::broadcast, Algorithm::direct, rooted<direct_broadcast>},
    {Operation::all_gather, Algorithm::ring, ring_all_gather, true},
    {Operation::all_gather, Algorithm::tree, rootless<tree_all_gather>},
    {Operation::all_gather, Algorithm::direct, direct_all_gather, true},
    {Operation::all_gather, Algorithm::halving, halving_all_gather},
    {Operation::reduce_scatter, Algorithm::ring, ring_reduce_scatter},
    {Operation::reduce_scatter, Algorithm::tree, rootless<tree_reduce_scatter>},
    {Operation::reduce_scatter, Algorithm::direct, rootless<direct_reduce_scatter>},
    {Operation::reduce_scatter, Algorithm::halving, halving_reduce_scatter},
    {Operation::barrier, Algorithm::direct, countless<direct_barrier>},
    {Operation::barrier, Algorithm::halving, countless<halving_barrier>},
    {Operation::reduce, Algorithm::ring, rooted<ring_reduce>},
    {Operation::reduce, Algorithm::tree, rooted<tree_reduce>},
    {Operation::reduce, Algorithm::direct, rooted<direct_reduce>},
    {Operation::gather, Algorithm::tree, rooted<tree_gather>},
    {Operation::gather, Algorithm::direct, rooted<direct_gather>},
    {Operation::scatter, Algorithm::tree, rooted<tree_scatter>},
    {Operation::scatter, Algorithm::direct, rooted<direct_scatter>},
    {Operation::all_to_all, Algorithm::direct, direct_all_to_all, true},
    {Operation::all_reduce, Algorithm::hierarchical, hierarchical_all_reduce},
    {Operation::broadcast, Algorithm::hierarchical, hierarchical_broadcast},
    {Operation::all_gather, Algorithm::hierarchical, hierarchical_all_gather},
    {Operation::reduce_scatter, Algorithm::hierarchical, hierarchical_reduce_scatter},
    {Operation::barrier, Algorithm::hierarchical, hierarchical_barrier},
    {Operation::reduce, Algorithm::hierarchical, hierarchical_reduce},
}};

// Whether the sum must be a fold: because the caller asks for it, or because the type would round
// at every addition.
bool needs_fold(const AlgorithmQuery& query) {
  if (query.operation != Operation::all_reduce && query.operation != Operation::reduce &&
      query.operation != Operation::reduce_scatter)
    return false;
  const bool rounds =
      query.op == ReduceOp::sum || query.op == ReduceOp::avg || query.op == ReduceOp::product;
  return query.reproducible || (is_half(query.dtype) && rounds);
}

// All contributions to an element must be received by one rank.
Algorithm choose_fold(const AlgorithmQuery& query) {
  const bool small = query.count * bytes_of(query.dtype) <= query.thresholds.small_bytes;
  return query.operation == Operation::all_reduce && !small ? Algorithm::direct_two_phase
                                                            : Algorithm::direct;
}

}  // namespace

// Up to kFewRanks, one step to all ranks costs less than the steps of a ring as long as a message
// takes at most a round trip.
Thresholds adapted(Thresholds thresholds, int size, std::chrono::microseconds round_trip) {
  const auto in_round_trip =
      static_cast<size_t>(kBytesPerUs * static_cast<double>(round_trip.count()));
  size_t& threshold = size <= kFewRanks ? thresholds.small_bytes : thresholds.middle_bytes;
  threshold = std::max(threshold, in_round_trip);
  return thresholds;
}

Algorithm choose(const AlgorithmQuery& query) {
  check(query.operation != Operation::send && query.operation != Operation::recv,
        "send and recv have no plan");
  if (query.size == 1) return Algorithm::direct;
  if (needs_fold(query)) return choose_fold(query);
  const size_t bytes = query.count * bytes_of(query.dtype);
  const size_t all_bytes = bytes * static_cast<size_t>(query.size);
  const auto [small_bytes, middle_bytes] = query.thresholds;
  const bool few = query.size <= kFewRanks, small = bytes <= small_bytes;
  const bool nearby = small && few, middle = !few && all_bytes <= middle_bytes;
  // Some host has several ranks, so a hierarchical plan sends fewer bytes between hosts.
  const bool levels = query.hosts > 1 && query.hosts < query.size;
  switch (query.operation) {
    case Operation::all_reduce:
      if (nearby) return Algorithm::direct;
      if (levels) return Algorithm::hierarchical;
      if (small) return Algorithm::tree;
      return !few && bytes <= middle_bytes ? Algorithm::halving : Algorithm::ring;
    case Operation::reduce:
      if (nearby) return Algorithm::direct;
      if (levels) return Algorithm::hierarchical;
      return small ? Algorithm::tree : Algorithm::ring;
    case Operation::broadcast:
      if (levels && !nearby) return Algorithm::hierarchical;
      return small ? Algorithm::tree : Algorithm::ring;
    case Operation::reduce_scatter:
      if (nearby) return Algorithm::direct;
      if (levels) return Algorithm::hierarchical;
      return middle ? Algorithm::halving : Algorithm::ring;
    case Operation::all_gather:
      if (nearby) return Algorithm::direct;
      // Both alternatives need all parts in scratch, and do not support counts.
      if (query.ragged || !(middle || (levels && all_bytes <= middle_bytes)))
        return Algorithm::ring;
      return levels ? Algorithm::hierarchical : Algorithm::halving;
    case Operation::gather:
    case Operation::scatter:
      return middle ? Algorithm::tree : Algorithm::direct;
    case Operation::barrier:
      if (few) return Algorithm::direct;
      return levels ? Algorithm::hierarchical : Algorithm::halving;
    case Operation::all_to_all:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return Algorithm::direct;
}

std::vector<Algorithm> algorithms_for(Operation operation, bool counts) {
  std::vector<Algorithm> found;
  for (const Entry& entry : kPlans)
    if (entry.operation == operation && (!counts || entry.supports_counts))
      found.push_back(entry.algorithm);
  return found;
}

Plan make_plan(Algorithm algorithm, Operation operation, const CollectiveShape& at) {
  check(algorithm != Algorithm::automatic, "make_plan needs an algorithm from choose()");
  check(operation != Operation::send && operation != Operation::recv, "send and recv have no plan");
  check(0 <= at.rank && at.rank < at.size && 0 <= at.root && at.root < at.size,
        "rank and root must be less than size");
  const bool counts = !at.counts.empty();
  for (const Entry& entry : kPlans)
    if (entry.operation == operation && entry.algorithm == algorithm &&
        (!counts || entry.supports_counts))
      return entry.plan(at);
  std::string names;
  for (const Algorithm other : algorithms_for(operation, counts))
    names += (names.empty() ? "" : ", ") + std::string(name_of(other));
  throw Unsupported(std::string(name_of(operation)) + (counts ? " with counts by rank" : "") +
                        " has no algorithm \"" + std::string(name_of(algorithm)) +
                        "\"; supported: " + names,
                    {.op = std::string(name_of(operation))});
}

}  // namespace pycomm::collectives
