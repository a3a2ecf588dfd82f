// Two-level plans for arrays with one part per rank. The parts that one lane sends must be
// contiguous, so scratch has all parts in this order: by lane, by host, by index there. A rank
// outside the lanes belongs to the lane of its index modulo their number; the rank of that lane on
// its host is its leader. Terms and drawings as in hierarchical.cpp.
#include "collectives/levels.h"

namespace pycomm::collectives {
namespace {

// The order of the parts in scratch.
struct Order {
  std::vector<int> ranks;                        // the rank of each part
  std::vector<size_t> lane_counts;               // by index on the host: elements of its lane, or 0
  std::vector<std::vector<size_t>> host_counts;  // by lane, then by host

  Order(const Levels& levels, size_t count)
      : lane_counts(static_cast<size_t>(levels.local_size())),
        host_counts(static_cast<size_t>(levels.lanes)) {
    const auto lanes = static_cast<size_t>(levels.lanes);
    for (size_t lane = 0; lane < lanes; ++lane)
      for (const auto& there : levels.members) {
        size_t parts = 0;
        for (size_t i = lane; i < there.size(); i += lanes, ++parts) ranks.push_back(there[i]);
        host_counts[lane].push_back(parts * count);
        lane_counts[lane] += parts * count;
      }
  }
};

// For a rank in a lane: the ranks on its host that it leads, itself first.
std::vector<int> followers(const Levels& levels) {
  std::vector<int> ranks;
  const auto& here = levels.here();
  for (auto i = static_cast<size_t>(levels.index); i < here.size();
       i += static_cast<size_t>(levels.lanes))
    ranks.push_back(here[i]);
  return ranks;
}

int leader(const Levels& levels) {
  return levels.here()[static_cast<size_t>(levels.index % levels.lanes)];
}

CollectiveShape inside(const Levels& levels, const Order& order) {
  return {.rank = levels.index, .size = levels.local_size(), .counts = order.lane_counts};
}

CollectiveShape across(const Levels& levels, const Order& order) {
  return {.rank = levels.host,
          .size = levels.hosts(),
          .counts = order.host_counts[static_cast<size_t>(levels.index)]};
}

}  // namespace

// Parts to the lanes, all-gather in each lane, all-gather inside, all in scratch. After a message
// from every rank, copy to the output:
//
//           rank 0           rank 1           rank 2
//   inside                   b to rank 0
//   lanes   a b to rank 2                     c to rank 0
//   inside  a b c to rank 1
//   copy    a b c            a b c            a b c           scratch to output
//
// Steps, short arrays: (here - 1) / lanes + log(hosts) + log(here). Elements between hosts:
// (hosts - 1) size count, of all ranks together.
Plan hierarchical_all_gather(const CollectiveShape& at) {
  const Levels levels(at);
  const bool is_large = is_long(at.count * static_cast<size_t>(at.size));
  if (levels.hosts() == 1) return is_large ? ring_all_gather(at) : halving_all_gather(at);
  const Order order(levels, at.count);
  const Range input{Space::input, 0, at.count};
  const size_t whole = static_cast<size_t>(at.size) * at.count;
  const auto collect = is_large ? ring_all_gather_stage : halving_all_gather;
  Plan plan;
  plan.scratch = whole;
  const size_t lane_at =
      levels.in_lane() ? part(Space::scratch, 0, order.lane_counts, levels.index).begin : 0;
  if (levels.in_lane()) {
    const CollectiveShape lane = across(levels, order);
    const size_t mine = part(Space::scratch, 0, lane.counts, lane.rank).begin;
    size_t place = lane_at + mine;
    for (const int rank : followers(levels)) {
      const bool own = rank == at.rank;
      plan.moves.push_back(
          {own ? rank : kNoRank, own ? input : Range{}, rank, {Space::scratch, place, at.count}});
      place += at.count;
    }
    append_stage(plan, collect(lane),
                 {.members = levels.lane(levels.index),
                  .input_at = lane_at + mine,
                  .input = Space::scratch,
                  .output_at = lane_at,
                  .output = Space::scratch,
                  .scratch_at = whole});
  } else {
    plan.moves.push_back({leader(levels), input});
  }
  if (levels.local_size() > 1)
    append_stage(plan, collect(inside(levels, order)),
                 {.members = levels.here(),
                  .input_at = lane_at,
                  .input = Space::scratch,
                  .output = Space::scratch,
                  .scratch_at = whole});
  for (size_t i = 0; i < order.ranks.size(); ++i)
    plan.moves.push_back({at.rank,
                          {Space::scratch, i * at.count, at.count},
                          at.rank,
                          part(Space::output, at.count, {}, order.ranks[i])});
  return plan;
}

// The reverse: copy to scratch, reduce-scatter inside by lanes, reduce-scatter in each lane by
// hosts, parts from the lanes:
//
//           rank 0           rank 1           rank 2
//   copy    a b c            a b c            a b c           input to scratch
//   inside                   a b c to rank 0
//   lanes   c to rank 2                       a b to rank 0   both finish
//   inside  b to rank 1
//
// Steps, short arrays: log(here) + log(hosts) + (here - 1) / lanes. Elements between hosts:
// (hosts - 1) size count, of all ranks together.
Plan hierarchical_reduce_scatter(const CollectiveShape& at) {
  const Levels levels(at);
  const size_t whole = static_cast<size_t>(at.size) * at.count;
  const auto scatter = is_long(whole) ? ring_reduce_scatter : halving_reduce_scatter;
  if (levels.hosts() == 1) return scatter(at);
  const Order order(levels, at.count);
  const Range output{Space::output, 0, at.count};
  Plan plan;
  for (size_t i = 0; i < order.ranks.size(); ++i)
    plan.moves.push_back({at.rank,
                          part(Space::input, at.count, {}, order.ranks[i]),
                          at.rank,
                          {Space::scratch, i * at.count, at.count}});
  const size_t lane_count = order.lane_counts[static_cast<size_t>(levels.index)];
  const bool alone = levels.local_size() == 1;
  const size_t sums_at = alone ? 0 : whole;
  plan.scratch = sums_at + lane_count;
  if (!alone)
    append_stage(plan, scatter(inside(levels, order)),
                 {.members = levels.here(),
                  .input = Space::scratch,
                  .output_at = sums_at,
                  .output = Space::scratch,
                  .scratch_at = plan.scratch});
  if (!levels.in_lane()) {
    plan.moves.push_back({kNoRank, {}, leader(levels), output});
    return plan;
  }
  const auto mine = followers(levels);
  const bool straight = mine.size() == 1;
  const size_t done_at = sums_at + lane_count;
  append_stage(plan, scatter(across(levels, order)),
               {.members = levels.lane(levels.index),
                .input_at = sums_at,
                .input = Space::scratch,
                .output_at = straight ? 0 : done_at,
                .output = straight ? Space::output : Space::scratch,
                .scratch_at = done_at + mine.size() * at.count,
                .finishes = true});
  for (size_t i = 0; !straight && i < mine.size(); ++i) {
    const Range done{Space::scratch, done_at + i * at.count, at.count};
    const bool own = mine[i] == at.rank;
    plan.moves.push_back({mine[i], done, own ? at.rank : kNoRank, own ? output : Range{}});
  }
  return plan;
}

}  // namespace pycomm::collectives
