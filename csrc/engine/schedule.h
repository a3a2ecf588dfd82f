// A plan with the dependencies of its moves: the received elements that a send needs, and the sends
// that must complete before a range may be overwritten. Computed once per plan.
#pragma once

#include <vector>

#include "collectives/plan.h"

namespace pycomm::engine {

struct Needs {
  // The last earlier move that writes what this one sends, or -1. If it writes exactly that range
  // (`streams`), elements can be forwarded as they arrive.
  int send_after = -1;
  bool streams = false;
  // The last earlier move that sends what this one overwrites, or -1.
  int receive_after = -1;
};

struct Schedule {
  collectives::Plan plan;
  std::vector<Needs> needs;  // one for each move
};

Schedule make_schedule(collectives::Plan plan, int rank);

}  // namespace pycomm::engine
