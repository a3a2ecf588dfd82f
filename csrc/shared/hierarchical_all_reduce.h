// Hierarchical all_reduce over several hosts whose ranks share memory inside each. Inside a host,
// shared/ sums blocks and copies results back; between hosts, a plan sums the blocks. The work is
// pipelined: one block crosses hosts while its neighbours are summed and copied back.
//
//   inside    sum 0, sum 1, spread 0, sum 2, spread 1, ...   the same order on all ranks of a host
//   between          cross 0,  cross 1,  ...                 each behind its sum, before its spread
//
// No rank writes its output before all others have made the call: a block's sum needs the ranks of
// its host, its crossing needs the other hosts.
#pragma once

#include <map>

#include "collectives/collectives.h"
#include "core/deadline.h"
#include "engine/engine.h"
#include "shared/shared_memory_region.h"

namespace pycomm::shared {

class HierarchicalAllReduce {
 public:
  // `region` is null if this rank is alone on its host.
  HierarchicalAllReduce(engine::Engine& engine, SharedMemoryRegion* region)
      : engine_(engine), region_(region) {}

  // `job` has no schedule yet; `at` has the hosts and the number of elements.
  void all_reduce(engine::PlanJob job, collectives::CollectiveShape at, const Deadline& deadline);

 private:
  struct PlannedBlocks {
    engine::Schedule schedule;
    std::vector<collectives::InterHostPlan::Block> blocks;
  };
  const PlannedBlocks& planned(const collectives::CollectiveShape& at, size_t element_bytes);

  engine::Engine& engine_;
  SharedMemoryRegion* region_;
  std::map<std::pair<size_t, size_t>, PlannedBlocks> plans_;  // by count and element size
};

}  // namespace pycomm::shared
