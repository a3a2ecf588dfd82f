// Runs the calls of a host group: chooses the algorithm, and runs a plan on the engine, a call in
// shared memory, a message, or the agreement about a call on devices.
//
// One thread at a time; HostGroup ensures that.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "collectives/choose.h"
#include "engine/engine.h"
#include "group/group.h"
#include "group/plan_cache.h"
#include "group/prepared_call.h"
#include "shared/flag_task.h"
#include "shared/hierarchical_all_reduce.h"
#include "shared/shared_memory_region.h"

namespace pycomm::group {

class CallRunner {
 public:
  // `region`: of this host's ranks if there are several and hosts share memory, else null.
  // `uses_hosts`: hosts share memory and there are several.
  CallRunner(engine::Engine& engine, const GroupInfo& info,
             const collectives::Thresholds& thresholds,
             std::unique_ptr<shared::SharedMemoryRegion> region, bool uses_hosts);

  // Throws Unsupported if this group cannot run the algorithm. Requires a call that check_call()
  // accepted.
  void check(const Call& call) const;
  // Sets the algorithm and the job. Call it when the call's turn has come.
  void prepare(PreparedCall& prepared) const;
  void run(const PreparedCall& prepared);

  // All ranks must call it with the same round trip, between the same calls.
  void adapt_to(std::chrono::microseconds round_trip) {
    thresholds_ = collectives::adapted(thresholds_, info_.size, round_trip);
  }

  shared::SharedMemoryRegion* region() const { return region_.get(); }

 private:
  bool shares_one_host() const { return region_ && info_.host_count == 1; }
  Algorithm algorithm_for(const Call& call) const;
  // Publishes the call to the ranks of this host, for those that wait in another call.
  void publish(const transport::Header& header) {
    if (region_) region_->begin(header);
  }
  void run_message(const PreparedCall& prepared);
  void run_shared(const engine::Job& job, const Deadline& deadline);
  engine::PlanTask begin_plan(const engine::Job& job);
  void run_counts(const PreparedCall& prepared);

  // agreement.cpp
  void agree(const PreparedCall& prepared);
  // For an all_to_all with counts: throws Mismatch on all ranks if one rank sends a different count
  // than its receiver expects.
  void check_splits(const PreparedCall& prepared);
  std::vector<size_t> gather_splits(const PreparedCall& prepared);

  engine::Engine& engine_;
  const GroupInfo& info_;
  collectives::Thresholds thresholds_;  // the same on all ranks
  PlanCache plans_;
  std::unique_ptr<shared::SharedMemoryRegion> region_;
  std::optional<shared::HierarchicalAllReduce> hierarchical_;
};

}  // namespace pycomm::group
