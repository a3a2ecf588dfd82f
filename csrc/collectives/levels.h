// What plans of two levels are made of: who shares a host, and plans of smaller groups as stages of
// a larger one. For hierarchical*.cpp alone.
#pragma once

#include <span>
#include <vector>

#include "collectives/collectives.h"

namespace pycomm {

// Where a rank stands among the hosts. Lanes run across hosts, as many as the smallest host has
// ranks; lane l goes through the rank of index l on each.
struct Levels {
  std::vector<std::vector<int>> members;  // by host, then by index; ascending but for `first`
  int lanes = 0;
  int host = 0, index = 0;  // of this rank

  // `first` gets index 0 on its host; kNoRank: no rank is preferred.
  explicit Levels(const CollectiveShape& at, int first = kNoRank);

  int hosts() const { return static_cast<int>(members.size()); }
  const std::vector<int>& here() const { return members[static_cast<size_t>(host)]; }
  int local_size() const { return static_cast<int>(here().size()); }
  bool in_lane() const { return index < lanes; }
  int host_of(int rank) const;
  // By host: the rank of lane `lane` there.
  std::vector<int> lane(int lane) const;
};

// Where a stage lies in the whole plan.
struct LevelStage {
  std::span<const int> members;  // by the stage's ranks: the rank in the whole
  size_t input_at = 0;           // of `input`: the place that the stage's input begins with
  Space input = Space::input;
  size_t output_at = 0;
  Space output = Space::output;
  size_t scratch_at = 0;
  bool finishes = false;  // else its last additions are like the others
};

// Runs `part`, the plan of a smaller group, behind what `plan` does already.
void append_stage(Plan& plan, const Plan& part, const LevelStage& stage);

// Whether an array is long enough for plans with many steps and no copies. To be measured.
inline bool is_long(size_t count) { return count >= 65536; }

}  // namespace pycomm
