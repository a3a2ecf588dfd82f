// The suite of engine_test.cpp (failures), with ranks that connect on demand.
#include "ranks.h"

namespace {
const bool kOnDemand = (ranks::full_mesh = 0, true);
}

// The suite itself, not a copy of it.
#include "engine_test.cpp"  // NOLINT(bugprone-suspicious-include)
