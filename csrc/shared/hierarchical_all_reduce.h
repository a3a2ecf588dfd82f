// Hierarchical all_reduce over several hosts whose ranks share memory inside each. Inside a host,
// shared/ sums blocks and gathers the results; between hosts, a plan sums the blocks. The work is
// pipelined: one block is sent between hosts while its neighbours are summed and gathered.
//
//   inside    sum 0, sum 1, gather 0, sum 2, gather 1, ...   the same order on all ranks of a host
//   between          send 0,   send 1,   ...                 each after its sum, before its gather
//
// No rank writes its output before all others have made the call: a block's sum needs the ranks of
// its host, and its messages need the other hosts.
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
  void all_reduce(engine::Job job, collectives::CollectiveShape at, const Deadline& deadline);

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
