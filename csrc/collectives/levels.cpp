#include "collectives/levels.h"

#include <algorithm>
#include <cstdint>

namespace pycomm::collectives {

Levels::Levels(const CollectiveShape& at, int first) {
  const auto host_at = [&](int rank) {
    return at.hosts.empty() ? size_t{0} : static_cast<size_t>(at.hosts[static_cast<size_t>(rank)]);
  };
  for (int rank = 0; rank < at.size; ++rank) {
    members.resize(std::max(members.size(), host_at(rank) + 1));
    members[host_at(rank)].push_back(rank);
  }
  if (first != kNoRank) {
    auto& there = members[host_at(first)];
    const auto found = std::ranges::find(there, first);
    std::rotate(there.begin(), found, found + 1);
  }
  size_t smallest = SIZE_MAX;
  for (const auto& ranks : members) smallest = std::min(smallest, ranks.size());
  lanes = static_cast<int>(smallest);
  host = host_of(at.rank);
  index = static_cast<int>(std::ranges::find(here(), at.rank) - here().begin());
}

int Levels::host_of(int rank) const {
  int found = 0;
  while (std::ranges::find(members[static_cast<size_t>(found)], rank) ==
         members[static_cast<size_t>(found)].end())
    ++found;
  return found;
}

std::vector<int> Levels::lane(int lane) const {
  std::vector<int> ranks;
  for (const auto& there : members) ranks.push_back(there[static_cast<size_t>(lane)]);
  return ranks;
}

void append_stage(Plan& plan, const Plan& part, const LevelStage& stage) {
  const auto rank_of = [&](int member) {
    return member == kNoRank ? kNoRank : stage.members[static_cast<size_t>(member)];
  };
  const auto place_of = [&](Range range) {
    switch (range.space) {
      case Space::input:
        return Range{stage.input, stage.input_at + range.begin, range.count};
      case Space::output:
        return Range{stage.output, stage.output_at + range.begin, range.count};
      case Space::scratch:
        range.begin += stage.scratch_at;
    }
    return range;
  };
  for (const Move& move : part.moves) {
    const bool last = move.combine == Combine::finish && !stage.finishes;
    plan.moves.push_back({rank_of(move.to), place_of(move.out), rank_of(move.from),
                          place_of(move.in), last ? Combine::reduce : move.combine,
                          place_of(move.with)});
  }
  plan.scratch = std::max(plan.scratch, stage.scratch_at + part.scratch);
}

}  // namespace pycomm::collectives
