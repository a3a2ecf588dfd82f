// A plan with what its moves wait for: which received elements a send needs, and which sends must
// be out before a place may be overwritten. Worked out once per plan and kept with it.
#pragma once

#include <vector>

#include "collectives/plan.h"

namespace pycomm {

struct Needs {
  // The last earlier move that writes what this one sends, or -1. When it writes exactly that range
  // (`streams`), elements can be sent on as they land.
  int send_after = -1;
  bool streams = false;
  // The last earlier move that sends what this one overwrites, or -1.
  int land_after = -1;
};

struct Schedule {
  Plan plan;
  std::vector<Needs> needs;  // one for each move
};

Schedule make_schedule(Plan plan, int rank);

}  // namespace pycomm
