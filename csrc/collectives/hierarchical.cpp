// Two-level plans, for ranks on several hosts. They send the fewest bytes between hosts, in as many
// concurrent lanes as the smallest host has ranks. Any number of ranks on each host, in any order.
// With one host they are one-level plans.
//
// Each plan is a sequence of one-level plans, on the ranks of a host and on those of a lane:
// `halving` for short arrays, `ring` for long ones. The drawings have ranks 0 and 1 on one host and
// rank 2 alone on another, so there is one lane, of ranks 0 and 2. "hosts" is their number, "here"
// the number of ranks on this host, "log" as in halving.cpp.
#include "collectives/levels.h"

namespace pycomm::collectives {
namespace {

// By index on the host: elements of each lane's piece, 0 for ranks in no lane.
std::vector<size_t> lane_counts(const Levels& levels, size_t count) {
  std::vector<size_t> counts(static_cast<size_t>(levels.local_size()));
  for (int lane = 0; lane < levels.lanes; ++lane)
    counts[static_cast<size_t>(lane)] = piece(Space::scratch, count, levels.lanes, lane).count;
  return counts;
}

// Afterwards scratch begins with this rank's piece of the sum over its host. A rank that is alone
// on its host uses its input instead.
void append_sum_inside(Plan& plan, const Levels& levels, size_t count) {
  const auto counts = lane_counts(levels, count);
  const CollectiveShape at{.rank = levels.index, .size = levels.local_size(), .counts = counts};
  if (at.size == 1) return;
  const size_t own = counts[static_cast<size_t>(levels.index)];
  plan.scratch = std::max(plan.scratch, own);
  append_stage(plan, is_long(count) ? ring_reduce_scatter(at) : halving_reduce_scatter(at),
               {.members = levels.here(), .output = Space::scratch, .scratch_at = own});
}

// All ranks of a host receive the lanes' pieces of the output.
void append_all_gather_inside(Plan& plan, const Levels& levels, size_t count) {
  const auto counts = lane_counts(levels, count);
  const CollectiveShape at{.rank = levels.index, .size = levels.local_size(), .counts = counts};
  if (at.size == 1) return;
  append_stage(plan, is_long(count) ? ring_all_gather_stage(at) : halving_all_gather(at),
               {.members = levels.here(),
                .input_at = part(Space::output, 0, counts, at.rank).begin,
                .input = Space::output});
}

}  // namespace

// Reduce-scatter inside, all-reduce in each lane, all-gather inside:
//
//           rank 0           rank 1           rank 2
//   inside                   a to rank 0                      rank 0 adds, in scratch
//   lanes   a to rank 2                       a to rank 0     as among two ranks of one level
//   inside  sum to rank 1                                     rank 1 copies
//
// Steps, short arrays: 2 log(hosts) + 2 log(here); long: 2 (hosts - 1) + 2 (here - 1). Elements
// between hosts: 2 (hosts - 1) count, of all ranks together.
Plan hierarchical_all_reduce(const CollectiveShape& at) {
  const auto one_level = [&](int rank, int size, size_t count) {
    return is_long(at.count) ? ring_all_reduce(rank, size, count)
                             : halving_all_reduce(rank, size, count);
  };
  const Levels levels(at);
  if (levels.hosts() == 1) return one_level(at.rank, at.size, at.count);
  Plan plan;
  append_sum_inside(plan, levels, at.count);
  if (levels.in_lane()) {
    const bool alone = levels.local_size() == 1;
    const Range own = piece(Space::output, at.count, levels.lanes, levels.index);
    append_stage(plan, one_level(levels.host, levels.hosts(), own.count),
                 {.members = levels.lane(levels.index),
                  .input = alone ? Space::input : Space::scratch,
                  .output_at = own.begin,
                  .scratch_at = own.count,
                  .finishes = true});
  }
  append_all_gather_inside(plan, levels, at.count);
  return plan;
}

// Each block is as in hierarchical_all_reduce without the stages inside hosts. Pieces are equal;
// the remainder is a block of its own in one lane.
InterHostPlan inter_host_all_reduce(const CollectiveShape& at, size_t block) {
  const Levels levels(at);
  const auto lanes = static_cast<size_t>(levels.lanes);
  const size_t even = at.count - at.count % lanes;
  const size_t step = std::max<size_t>(block / lanes, 1) * lanes;
  InterHostPlan inter_host;
  for (size_t begin = 0; begin < even; begin += step)
    inter_host.blocks.push_back({begin, std::min(step, even - begin), levels.lanes, 0, 0});
  if (even < at.count || at.count == 0)
    inter_host.blocks.push_back({even, at.count - even, 1, 0, 0});
  const bool alone = levels.local_size() == 1;
  // The remainder, in one lane, can be longer than a lane's piece of another block.
  size_t place = 0;
  for (const InterHostPlan::Block& block : inter_host.blocks)
    place = std::max(place, block.count / static_cast<size_t>(block.lanes));
  for (size_t i = 0; i < inter_host.blocks.size(); ++i) {
    InterHostPlan::Block& now = inter_host.blocks[i];
    now.sum_at = i % kSumsAhead * place;
    const size_t piece_count = now.count / static_cast<size_t>(now.lanes);
    if (levels.index < now.lanes)
      append_stage(inter_host.plan,
                   is_long(now.count)
                       ? ring_all_reduce(levels.host, levels.hosts(), piece_count)
                       : halving_all_reduce(levels.host, levels.hosts(), piece_count),
                   {.members = levels.lane(levels.index),
                    .input_at = alone ? now.begin : now.sum_at,
                    .input = alone ? Space::input : Space::scratch,
                    .output_at = now.begin + static_cast<size_t>(levels.index) * piece_count,
                    .scratch_at = alone ? 0 : kSumsAhead * place,
                    .finishes = true});
    now.end = inter_host.plan.moves.size();
  }
  return inter_host;
}

// Reduce-scatter inside, then a reduce in each lane to the root's host, whose lanes send their
// pieces to the root. The root has index 0 on its host.
//
//           rank 0           rank 1           rank 2
//   inside                   a to rank 0                      rank 0 adds, in scratch
//   lanes                                     a to rank 0     rank 0 finishes, in the output
//
// Steps, short arrays: log(hosts) + log(here) + lanes - 1. Elements between hosts:
// (hosts - 1) count, of all ranks together.
Plan hierarchical_reduce(const CollectiveShape& at) {
  const auto one_level = [&](int rank, int size, size_t count, int root) {
    return is_long(at.count) ? ring_reduce(rank, size, count, root)
                             : tree_reduce(rank, size, count, root);
  };
  const Levels levels(at, at.root);
  if (levels.hosts() == 1) return one_level(at.rank, at.size, at.count, at.root);
  const bool at_root = at.rank == at.root, alone = levels.local_size() == 1;
  const int home = levels.host_of(at.root);
  const auto own = [&](int lane) { return piece(Space::output, at.count, levels.lanes, lane); };
  Plan plan;
  append_sum_inside(plan, levels, at.count);
  if (!levels.in_lane()) return plan;
  const size_t count = own(levels.index).count;
  const Range sum{Space::scratch, count, count};  // the result of a lane, for the root
  if (levels.host == home && !at_root) plan.scratch = std::max(plan.scratch, 2 * count);
  append_stage(plan, one_level(levels.host, levels.hosts(), count, home),
               {.members = levels.lane(levels.index),
                .input = alone ? Space::input : Space::scratch,
                .output_at = at_root ? 0 : sum.begin,
                .output = at_root ? Space::output : Space::scratch,
                .scratch_at = 2 * count,
                .finishes = true});
  if (levels.host == home && !at_root) plan.moves.push_back({at.root, sum});
  for (int lane = 1; at_root && lane < levels.lanes; ++lane)
    plan.moves.push_back({kNoRank, {}, levels.here()[static_cast<size_t>(lane)], own(lane)});
  return plan;
}

// The root sends each lane of its host its piece, each lane broadcasts its own, all-gather inside.
// The root has index 0 on its host.
//
//           rank 0           rank 1           rank 2
//   lanes   a to rank 2
//   inside  a to rank 1
//
// Steps, short arrays: lanes - 1 + log(hosts) + log(here). Elements between hosts:
// (hosts - 1) count, of all ranks together.
Plan hierarchical_broadcast(const CollectiveShape& at) {
  const auto one_level = [&](int rank, int size, size_t count, int root) {
    return is_long(at.count) ? ring_broadcast(rank, size, count, root)
                             : tree_broadcast(rank, size, count, root);
  };
  const Levels levels(at, at.root);
  if (levels.hosts() == 1) return one_level(at.rank, at.size, at.count, at.root);
  const int home = levels.host_of(at.root);
  const auto own = [&](int lane) { return piece(Space::output, at.count, levels.lanes, lane); };
  Plan plan;
  for (int lane = 1; at.rank == at.root && lane < levels.lanes; ++lane)
    plan.moves.push_back({levels.here()[static_cast<size_t>(lane)], own(lane)});
  if (levels.in_lane()) {
    const Range mine = own(levels.index);
    if (levels.host == home && at.rank != at.root)
      plan.moves.push_back({kNoRank, {}, at.root, mine});
    append_stage(plan, one_level(levels.host, levels.hosts(), mine.count, home),
                 {.members = levels.lane(levels.index), .output_at = mine.begin});
  }
  append_all_gather_inside(plan, levels, at.count);
  return plan;
}

// The ranks of a host send an empty message to its first rank, the first ranks exchange tokens, and
// each sends a token to its host.
//
//           rank 0           rank 1           rank 2
//   inside                   empty to 0
//   lane    token to rank 2                   token to rank 0
//   inside  token to rank 1
//
// Steps: 2 (here - 1) + log(hosts). Elements between hosts: hosts log(hosts), of all ranks
// together.
Plan hierarchical_barrier(const CollectiveShape& at) {
  const Levels levels(at);
  if (levels.hosts() == 1) return halving_barrier(at.rank, at.size);
  const auto& here = levels.here();
  Plan plan;
  if (levels.index > 0) {
    plan.moves.push_back({here[0], {}, here[0], {Space::scratch, 0, 1}});
    plan.scratch = 1;
    return plan;
  }
  for (size_t i = 1; i < here.size(); ++i) plan.moves.push_back({kNoRank, {}, here[i], {}});
  append_stage(plan, halving_barrier(levels.host, levels.hosts()), {.members = levels.lane(0)});
  const Range token = plan.moves.back().in;
  for (size_t i = 1; i < here.size(); ++i) plan.moves.push_back({here[i], token});
  return plan;
}

}  // namespace pycomm::collectives
