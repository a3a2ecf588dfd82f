// The suite of group_test.cpp, what a group does when all goes well, once more with ranks that
// connect when they first need each other.
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
