#include "group/plan_cache.h"

#include <algorithm>
#include <utility>

#include "collectives/choose.h"
#include "group/check.h"

namespace pycomm::group {
namespace {

// Scratch of one call. A call that needs more runs in blocks. With 8 MiB of rings (mesh.cpp) and a
// segment of 1 MiB, a group uses less than 16 MiB per rank for any message size.
constexpr size_t kScratchBytes = size_t{6} << 20;
constexpr size_t kMaxPlans = 256;

int root_of(const Call& call) { return is_rooted(call.operation) ? call.peer : 0; }

}  // namespace

collectives::CollectiveShape PlanCache::shape_of(const Call& call, int rank, size_t count) const {
  return {.rank = rank,
          .size = info_.size,
          .count = count,
          .root = root_of(call),
          .counts = call.counts,
          .hosts = info_.hosts};
}

engine::Schedule PlanCache::schedule_of(const Call& call, Algorithm algorithm, size_t count) const {
  return engine::make_schedule(
      collectives::make_plan(algorithm, call.operation, shape_of(call, info_.rank, count)),
      info_.rank);
}

// How many elements of a call run at a time, so that scratch stays within kScratchBytes. All ranks
// must compute the same number, so each considers the plans of all ranks, or of rank 0 only if they
// are alike. A reduce_scatter whose ranges span chunks cannot be cut into blocks and runs whole.
size_t PlanCache::block_of(const Call& call, Algorithm algorithm, size_t count) const {
  const bool simple = algorithm == Algorithm::ring || algorithm == Algorithm::direct;
  if (!reduces(call.operation) || (call.operation == Operation::reduce_scatter && !simple))
    return count;
  const bool alike =
      call.operation != Operation::reduce &&
      (simple || algorithm == Algorithm::direct_two_phase || algorithm == Algorithm::tree);
  const auto scratch_of = [&](size_t block) {
    size_t most = 0;
    for (int rank = 0; rank < (alike ? 1 : info_.size); ++rank)
      most = std::max(
          most,
          collectives::make_plan(algorithm, call.operation, shape_of(call, rank, block)).scratch);
    return most * bytes_of(call.dtype);
  };
  for (size_t block = count;;) {
    const size_t scratch = scratch_of(block);
    if (scratch <= kScratchBytes || block <= 1) return block;
    block = std::max<size_t>(1, std::min(block - 1, block / (scratch / kScratchBytes + 1)));
    // Each block starts where a piece may.
    if (block > collectives::kPieceGrain) block -= block % collectives::kPieceGrain;
  }
}

const PlanCache::Planned& PlanCache::find(const Call& call, Algorithm algorithm, size_t count) {
  const auto key = std::tuple(call.operation, algorithm, count, root_of(call));
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  Planned made{schedule_of(call, algorithm, count), block_of(call, algorithm, count)};
  return plans_.emplace(key, std::move(made)).first->second;
}

}  // namespace pycomm::group
