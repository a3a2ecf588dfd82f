// The plans of a group's collectives, by call. A call whose scratch would be too large runs in
// several blocks.
#pragma once

#include <cstddef>
#include <map>
#include <tuple>

#include "collectives/plan.h"
#include "engine/schedule.h"
#include "group/group.h"

namespace pycomm::group {

class PlanCache {
 public:
  struct Planned {
    engine::Schedule schedule;  // for all elements of the call
    size_t block = 0;           // elements that run at a time
  };

  explicit PlanCache(const GroupInfo& info) : info_(info) {}

  // For `count` elements, which may be a block of the call. Valid until the next find().
  const Planned& find(const Call& call, Algorithm algorithm, size_t count);
  // Not cached, for calls with counts, which change between calls.
  engine::Schedule schedule_of(const Call& call, Algorithm algorithm, size_t count) const;
  collectives::CollectiveShape shape_of(const Call& call, int rank, size_t count) const;

 private:
  size_t block_of(const Call& call, Algorithm algorithm, size_t count) const;

  const GroupInfo& info_;
  std::map<std::tuple<Operation, Algorithm, size_t, int>, Planned> plans_;
};

}  // namespace pycomm::group
