// The suite of engine_test.cpp, what it does when something goes wrong, once more with ranks that
// connect when they first need each other.
#include "ranks.h"

namespace {
const bool kOnDemand = (ranks::full_mesh = 0, true);
}

// The suite itself, not a copy of it.
#include "engine_test.cpp"  // NOLINT(bugprone-suspicious-include)
