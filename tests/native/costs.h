// The costs in the comment above each plan, computed independently of the plans.
#pragma once

#include <cstddef>

#include "core/operation.h"
#include "prove.h"

namespace pycomm {

// Of one rank; `steps` of all together.
struct Cost {
  size_t messages = 0, elements = 0;
  int steps = 0;
  bool bound = false;  // there may be fewer steps
};

Cost cost_of(Algorithm algorithm, int rank, int size, const Case& what);

}  // namespace pycomm
