// The suite of group_test.cpp (no failures), with ranks that connect on demand.
#include "ranks.h"

namespace {
const bool kOnDemand = [] {
  ranks::full_mesh = 0;
  only = {"every verb", "messages are kept", "split by", "two groups"};
  return true;
}();
}  // namespace

// The suite itself, not a copy of it.
#include "group_test.cpp"  // NOLINT(bugprone-suspicious-include)
