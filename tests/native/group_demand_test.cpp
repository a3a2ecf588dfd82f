// The suites of group_test.cpp and messages_test.cpp (no failures), with ranks that connect on
// demand.
#include "ranks.h"

namespace {
const bool kOnDemand = [] {
  ranks::full_mesh = 0;
  only = {"every verb", "messages are kept", "small sends", "split by", "two groups"};
  return true;
}();
}  // namespace

// The suites themselves, not copies of them.
#include "group_test.cpp"     // NOLINT(bugprone-suspicious-include)
#include "messages_test.cpp"  // NOLINT(bugprone-suspicious-include)
