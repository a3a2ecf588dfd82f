#include "cases.h"

#include "collectives/choose.h"

namespace pycomm {
namespace {

// The counts of a case as rank `rank` passes them.
std::vector<size_t> counts_of(int rank, int size, const Case& what) {
  if (what.operation != Operation::all_to_all || what.counts.empty()) return what.counts;
  const auto n = static_cast<size_t>(size), r = static_cast<size_t>(rank);
  std::vector<size_t> counts;
  for (size_t to = 0; to < n; ++to) counts.push_back(what.counts[r * n + to]);
  for (size_t from = 0; from < n; ++from) counts.push_back(what.counts[from * n + r]);
  return counts;
}

}  // namespace

std::vector<collectives::Plan> plans_of(Algorithm algorithm, int size, const Case& what) {
  std::vector<collectives::Plan> plans;
  for (int rank = 0; rank < size; ++rank) {
    const auto counts = counts_of(rank, size, what);
    plans.push_back(collectives::make_plan(algorithm, what.operation,
                                           {.rank = rank,
                                            .size = size,
                                            .count = what.count,
                                            .root = what.root,
                                            .counts = counts,
                                            .hosts = what.hosts}));
  }
  return plans;
}

std::string title(Algorithm algorithm, int size, const Case& what) {
  return std::string(name_of(algorithm)) + " " + std::string(name_of(what.operation)) + ", size " +
         std::to_string(size) + ", count " + std::to_string(what.count) + ", root " +
         std::to_string(what.root) + (what.aliased ? ", in place" : "");
}

}  // namespace pycomm
