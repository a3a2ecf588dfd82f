// Which plan a call gets. Pure functions: all ranks ask the same question and get the same answer.
// group/ calls them; what they choose among is in collectives.h.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/plan.h"
#include "core/dtype.h"
#include "core/operation.h"
#include "core/reduce_op.h"

namespace pycomm {

// Up to where choices turn; these are built in, `pycomm tune` measures others.
struct Thresholds {
  // Up to this a message costs its latency more than its bytes, and sending everything to everybody
  // beats two rounds. A prototype inside one host turned here.
  size_t small_bytes = size_t{16} << 10;
  // With more than a few ranks: up to this (of the whole array) log2(size) steps that copy
  // everything once more beat a ring's size - 1 steps. To be measured.
  size_t middle_bytes = size_t{1} << 20;
};

// `count` as in collectives.h; where counts differ by rank, in all_gather their mean, rounded up,
// and in all_to_all 0, for ranks that see different counts have to choose the same. `dtype` and
// `op` matter to all_reduce, reduce and reduce_scatter: 16-bit floats that round at every addition
// are folded instead, with one rounding.
struct AlgorithmQuery {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  int size = 1;
  size_t count = 0;
  bool reproducible =
      false;            // bits depend on the inputs alone: sums in rank order whatever the size
  bool ragged = false;  // counts differ by rank
  int hosts = 1;        // on how many the ranks are
  Thresholds thresholds{};
};

// Never `automatic`, always one of algorithms_for(query.operation). send and recv are no plans:
// to ask for one is a bug.
Algorithm choose(const AlgorithmQuery& query);

// The algorithms that have a plan for this operation, with counts by rank if `counts`; none for
// send and recv.
std::vector<Algorithm> algorithms_for(Operation operation, bool counts = false);

// Throws Unsupported for an algorithm that has no plan for this operation and its counts.
// `automatic`, send and recv are bugs of the caller.
Plan make_plan(Algorithm algorithm, Operation operation, const CollectiveShape& at);

}  // namespace pycomm
