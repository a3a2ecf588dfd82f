// Building blocks of two-level plans: the ranks of each host, and plans of smaller groups as stages
// of a larger one. For hierarchical*.cpp only.
#pragma once

#include <span>
#include <vector>

#include "collectives/collectives.h"

namespace pycomm::collectives {

// Position of a rank among the hosts. A lane is a set of ranks, one per host; there are as many
// lanes as the smallest host has ranks. Lane l consists of the rank of index l on each host.
struct Levels {
  std::vector<std::vector<int>> members;  // by host, then by index; ascending except `first`
  int lanes = 0;
  int host = 0, index = 0;  // of this rank

  // `first` gets index 0 on its host. kNoRank: ascending order.
  explicit Levels(const CollectiveShape& at, int first = kNoRank);

  int hosts() const { return static_cast<int>(members.size()); }
  const std::vector<int>& here() const { return members[static_cast<size_t>(host)]; }
  int local_size() const { return static_cast<int>(here().size()); }
  bool in_lane() const { return index < lanes; }
  int host_of(int rank) const;
  // By host: the rank of lane `lane` there.
  std::vector<int> lane(int lane) const;
};

// Placement of a stage in the whole plan.
struct LevelStage {
  std::span<const int> members;  // by rank in the stage: the rank in the whole plan
  size_t input_at = 0;           // offset of the stage's input in `input`
  Space input = Space::input;
  size_t output_at = 0;
  Space output = Space::output;
  size_t scratch_at = 0;
  bool finishes = false;  // false: its last additions are no final ones
};

// Appends `part`, the plan of a smaller group, to `plan`.
void append_stage(Plan& plan, const Plan& part, const LevelStage& stage);

// Whether an array is assumed to be long enough for plans with many steps and no copies.
inline bool is_long(size_t count) { return count >= 65536; }

}  // namespace pycomm::collectives
