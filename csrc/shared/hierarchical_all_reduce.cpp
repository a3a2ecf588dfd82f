#include "shared/hierarchical_all_reduce.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "shared/staged_task.h"

namespace pycomm::shared {
namespace {

// Bytes of a block: small enough to pipeline several, large enough that ranks rarely wait.
constexpr size_t kBlockBytes = size_t{1} << 20;
// A larger call runs as several, so that plans stay short.
constexpr size_t kMaxPlanBytes = size_t{64} << 20;
constexpr size_t kMaxPlans = 64;

class HierarchicalTask final : public engine::Task {
 public:
  HierarchicalTask(engine::Engine& engine, SharedMemoryRegion* region, const engine::Job& job,
                   const std::vector<collectives::InterHostPlan::Block>& blocks)
      : engine_(engine),
        region_(region),
        job_(job),
        blocks_(blocks),
        inter_host_(engine.plan_task(job)) {
    if (region_ == nullptr) summed_ = gathered_ = blocks_.size();
    allow();
  }

  bool advance() override {
    const bool moved = inter_host_.advance();
    return advance_inside() || moved;
  }
  bool done() const override { return gathered_ == blocks_.size() && inter_host_.done(); }
  int sending_to() const override { return inter_host_.sending_to(); }
  // While a block is sent between hosts, the ranks of this host wait for the same remote ranks.
  int receiving_from() const override {
    if (const int from = inter_host_.receiving_from(); from != collectives::kNoRank) return from;
    return inside_ && sending_to() == collectives::kNoRank ? inside_->receiving_from()
                                                           : collectives::kNoRank;
  }
  size_t receiving_bytes() const override {
    return inter_host_.receiving_from() == collectives::kNoRank ? 0 : inter_host_.receiving_bytes();
  }
  void arm() override {
    if (inside_) inside_->arm();
  }
  void disarm() override {
    if (inside_) inside_->disarm();
  }

 private:
  bool advance_inside() {
    if (!inside_) return begin_inside();
    if (!inside_->done()) return inside_->advance();
    inside_.reset();
    if (!std::exchange(gathers_, false)) {
      ++summed_;
      allow();
    } else {
      ++gathered_;
    }
    return true;
  }

  void allow() {
    inter_host_.allow(summed_ == blocks_.size() ? SIZE_MAX
                      : summed_ == 0            ? 0
                                                : blocks_[summed_ - 1].end);
  }

  bool begin_inside() {
    if (gathered_ == blocks_.size()) return false;
    gathers_ = summed_ == blocks_.size() || summed_ == gathered_ + collectives::kSumsAhead;
    const collectives::InterHostPlan::Block& block = blocks_[gathers_ ? gathered_ : summed_];
    if (gathers_ && inter_host_.passed() < block.end) return false;
    const auto mine = static_cast<size_t>(region_->rank());
    const size_t piece = block.count / static_cast<size_t>(block.lanes);
    step_ = {.header = job_.header,
             .input = job_.input + bytes(block.begin),
             .element_bytes = job_.element_bytes,
             .reducer = job_.reducer,
             .operation = Operation::reduce_scatter,
             .count = piece,
             .parts = block.lanes};
    if (gathers_) {
      step_.operation = Operation::all_gather;
      step_.output = job_.output + bytes(block.begin);
      step_.input = step_.output + (region_->rank() < block.lanes ? mine * bytes(piece) : 0);
    } else if (region_->rank() < block.lanes) {
      step_.output =
          engine_.scratch(bytes(job_.schedule->plan.scratch)).data() + bytes(block.sum_at);
    }
    inside_.emplace(engine_, *region_, step_);
    return true;
  }

  size_t bytes(size_t count) const { return count * job_.element_bytes; }

  engine::Engine& engine_;
  SharedMemoryRegion* region_;
  const engine::Job& job_;
  const std::vector<collectives::InterHostPlan::Block>& blocks_;
  engine::PlanTask inter_host_;
  size_t summed_ = 0, gathered_ = 0;  // blocks
  bool gathers_ = false;              // whether inside_ gathers a block; else it sums one
  engine::Job step_;
  std::optional<StagedTask> inside_;
};

}  // namespace

const HierarchicalAllReduce::PlannedBlocks& HierarchicalAllReduce::planned(
    const collectives::CollectiveShape& at, size_t element_bytes) {
  const auto key = std::pair(at.count, element_bytes);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  collectives::InterHostPlan inter_host =
      collectives::inter_host_all_reduce(at, kBlockBytes / element_bytes);
  PlannedBlocks made{engine::make_schedule(std::move(inter_host.plan), at.rank),
                     std::move(inter_host.blocks)};
  return plans_.emplace(key, std::move(made)).first->second;
}

void HierarchicalAllReduce::all_reduce(engine::Job job, collectives::CollectiveShape at,
                                       const Deadline& deadline) {
  size_t left = at.count;
  do {
    at.count = std::min(left, kMaxPlanBytes / job.element_bytes);
    const PlannedBlocks& plan = planned(at, job.element_bytes);
    job.schedule = &plan.schedule;
    if (region_ != nullptr) region_->begin(job.header);
    HierarchicalTask run(engine_, region_, job, plan.blocks);
    engine_.run(run, job.header, deadline);
    left -= at.count;
    job.header = engine_.next_header(job.header);
    job.input += at.count * job.element_bytes;
    job.output += at.count * job.element_bytes;
  } while (left > 0);
}

}  // namespace pycomm::shared
