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

// `count` as in collectives.h. `dtype` and `op` matter to all_reduce and reduce_scatter: 16-bit
// floats that round at every addition are folded instead, with one rounding.
struct Question {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  int size = 1;
  size_t count = 0;
  bool reproducible =
      false;  // bits depend on the inputs alone: sums in rank order whatever the size
};

// Never `automatic`, always one of algorithms_for(question.operation). send and recv are no plans:
// to ask for one is a bug.
Algorithm choose(const Question& question);

// The algorithms that have a plan for this operation; none for send and recv.
std::vector<Algorithm> algorithms_for(Operation operation);

// Throws Unsupported for an algorithm that has no plan for this operation. `automatic`, send and
// recv are bugs of the caller.
Plan make_plan(Algorithm algorithm, Operation operation, const Place& at);

}  // namespace pycomm
