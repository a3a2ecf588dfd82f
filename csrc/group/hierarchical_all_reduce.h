// all_reduce over several hosts whose ranks share memory inside each: summed and spread inside by
// the strategy of shared/, carried between hosts by a plan, block by block, so that one block
// crosses while its neighbours are summed and spread.
//
//   inside    sum 0, sum 1, spread 0, sum 2, spread 1, ...   the same order on all ranks of a host
//   between          cross 0,  cross 1,  ...                 each behind its sum, before its spread
//
// No output is written before its rank has heard of all others: of those of its host by a sum, of
// the hosts by crossing. Called by host_group.cpp.
#pragma once

#include <map>

#include "collectives/collectives.h"
#include "core/deadline.h"
#include "engine/engine.h"
#include "shared/shared_memory_region.h"

namespace pycomm {

class HierarchicalAllReduce {
 public:
  // `region` is null where this rank is alone on its host.
  HierarchicalAllReduce(Engine& engine, SharedMemoryRegion* region)
      : engine_(engine), region_(region) {}

  // `job` without a schedule; `at` has the hosts, and the elements of the array.
  void all_reduce(PlanJob job, CollectiveShape at, const Deadline& deadline);

 private:
  struct PlannedBlocks {
    Schedule schedule;
    std::vector<InterHostPlan::Block> blocks;
  };
  const PlannedBlocks& planned(const CollectiveShape& at, size_t element_bytes);

  Engine& engine_;
  SharedMemoryRegion* region_;
  std::map<std::pair<size_t, size_t>, PlannedBlocks> plans_;  // by elements and their bytes
};

}  // namespace pycomm
