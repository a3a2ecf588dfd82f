// Selects the plan of a call. Pure functions, so all ranks select the same plan.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "collectives/plan.h"
#include "core/dtype.h"
#include "core/operation.h"
#include "core/reduce_op.h"

namespace pycomm::collectives {

// Upper limits of the choices. These are defaults; `pycomm tune` measures others.
struct Thresholds {
  // Up to this size the latency of a message exceeds its transfer time, and one step with all peers
  // is faster than two. Measured with a prototype inside one host.
  size_t small_bytes = size_t{16} << 10;
  // With more than 8 ranks: up to this size (of the whole array) log2(size) steps with one extra
  // copy are faster than the size - 1 steps of a ring.
  size_t middle_bytes = size_t{1} << 20;
};

// The thresholds of a group of `size` ranks whose slowest connection has this round trip: over a
// distance, fewer steps are faster for larger messages. The arguments must be equal on all ranks.
Thresholds adapted(Thresholds thresholds, int size, std::chrono::microseconds round_trip);

// `count` as in collectives.h. If counts differ by rank: in all_gather their mean, rounded up, and
// in all_to_all 0, because ranks that see different counts must select the same plan. `dtype` and
// `op` matter to all_reduce, reduce and reduce_scatter: 16-bit floats would round at every
// addition, so they are folded with one rounding.
struct AlgorithmQuery {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  int size = 1;
  size_t count = 0;
  // The bits depend on the inputs alone: sums are in rank order for every count.
  bool reproducible = false;
  bool ragged = false;  // counts differ by rank
  int hosts = 1;        // number of hosts
  Thresholds thresholds{};
};

// Returns one of algorithms_for(query.operation), never `automatic`. Throws InternalError for send
// and recv, which have no plan.
Algorithm choose(const AlgorithmQuery& query);

// The algorithms with a plan for this operation; if `counts`, only those that support counts by
// rank. None for send and recv.
std::vector<Algorithm> algorithms_for(Operation operation, bool counts = false);

// Throws Unsupported if the algorithm has no plan for this operation and its counts, and
// InternalError for `automatic`, send and recv.
Plan make_plan(Algorithm algorithm, Operation operation, const CollectiveShape& at);

}  // namespace pycomm::collectives
