// StreamStages of every plan: no rank waits without end, messages match in order, nothing is lost,
// and rings have as many stages as steps. tests/emulator/streams_test.cpp runs them.
#include "device/stages.h"

#include <map>
#include <string>
#include <vector>

#include "collectives/choose.h"
#include "collectives/collectives.h"
#include "harness.h"

using namespace pycomm;
using namespace pycomm::collectives;
using namespace pycomm::device;

namespace {

constexpr Operation kOperationsWithPlans[] = {
    Operation::all_reduce,     Operation::broadcast, Operation::all_gather,
    Operation::reduce_scatter, Operation::barrier,   Operation::reduce,
    Operation::gather,         Operation::scatter,   Operation::all_to_all};

struct Case {
  Operation operation;
  Algorithm algorithm;
  int size;
  size_t count;
  int root;
  std::vector<int> hosts{};
  int lane = 0, lanes = 1;

  CollectiveShape at(int rank) const {
    return {.rank = rank, .size = size, .count = count, .root = root, .counts = {}, .hosts = hosts};
  }
  std::string text() const {
    return std::string(name_of(operation)) + " by " + std::string(name_of(algorithm)) + ", " +
           std::to_string(size) + " ranks, count " + std::to_string(count) + ", root " +
           std::to_string(root);
  }
};

StreamStages stages_of(const Case& one, int rank) {
  const Plan plan = make_plan(one.algorithm, one.operation, one.at(rank));
  return make_channels(plan, rank, one.lanes).at(static_cast<size_t>(one.lane));
}

// Ranks run their stages as streams do: a stage ends when all its messages have matched, and a
// message matches its counterpart while both are in stages that have begun.
class Streams {
 public:
  explicit Streams(const Case& one) : case_(one) {
    for (int rank = 0; rank < one.size; ++rank) {
      ranks_.push_back(stages_of(one, rank));
      at_.push_back(0);
      left_.emplace_back();
      begin(rank);
    }
  }

  void run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int rank = 0; rank < case_.size; ++rank) moved = meet(rank) || moved;
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      expect(at_[rank] == ranks_[rank].stages.size(),
             case_.text() + ": rank " + std::to_string(rank) + " waits without end in stage " +
                 std::to_string(at_[rank]));
  }

 private:
  struct Left {
    std::map<int, std::vector<size_t>> sends, receives;  // counts by peer, in order
    bool empty() const { return sends.empty() && receives.empty(); }
  };

  void begin(int rank) {
    const auto r = static_cast<size_t>(rank);
    while (left_[r].empty() && at_[r] < ranks_[r].stages.size()) {
      const StreamStage& stage = ranks_[r].stages[at_[r]];
      for (const auto& [peer, range] : stage.sends) left_[r].sends[peer].push_back(range.count);
      for (const auto& [peer, range] : stage.receives)
        left_[r].receives[peer].push_back(range.count);
      if (left_[r].empty()) ++at_[r];  // only local steps
    }
  }

  bool meet(int rank) {
    Left& mine = left_[static_cast<size_t>(rank)];
    for (auto& [to, counts] : mine.sends) {
      const int peer = to;  // its entry may be erased
      Left& theirs = left_[static_cast<size_t>(peer)];
      const auto found = theirs.receives.find(rank);
      if (found == theirs.receives.end()) continue;
      expect_equal(counts.front(), found->second.front(), case_.text());
      pop(mine.sends, peer);
      pop(theirs.receives, rank);
      end_if_over(rank);
      end_if_over(peer);
      return true;
    }
    return false;
  }

  static void pop(std::map<int, std::vector<size_t>>& all, int peer) {
    auto& counts = all.at(peer);
    counts.erase(counts.begin());
    if (counts.empty()) all.erase(peer);
  }

  void end_if_over(int rank) {
    const auto r = static_cast<size_t>(rank);
    if (!left_[r].empty() || at_[r] >= ranks_[r].stages.size()) return;
    ++at_[r];
    begin(rank);
  }

  Case case_;
  std::vector<StreamStages> ranks_;
  std::vector<size_t> at_;
  std::vector<Left> left_;
};

// Elements that this rank sends by the plan.
size_t sent_by_plan(const Case& one, int rank) {
  size_t sent = 0;
  for (const Move& move : make_plan(one.algorithm, one.operation, one.at(rank)).moves)
    if (move.to != kNoRank && move.to != rank) sent += move.out.count;
  return sent;
}

void check(const Case& one) {
  Streams(one).run();
  for (int rank = 0; rank < one.size; ++rank) {
    size_t sent = 0;
    const Plan plan = make_plan(one.algorithm, one.operation, one.at(rank));
    for (const StreamStage& stage : make_stream_stages(plan, rank).stages)
      for (const StreamStage::Message& message : stage.sends) sent += message.range.count;
    expect_equal(sent, sent_by_plan(one, rank), one.text() + ": elements sent");
  }
}

bool is_rooted(Operation operation) {
  return operation == Operation::broadcast || operation == Operation::reduce ||
         operation == Operation::gather || operation == Operation::scatter;
}

void check_all(int size, const std::vector<int>& hosts) {
  for (const Operation operation : kOperationsWithPlans)
    for (const Algorithm algorithm : algorithms_for(operation))
      for (const size_t count : {size_t{1}, static_cast<size_t>(size) * 3 + 1, size_t{40'000}})
        for (const int root : {0, size - 1})
          if (root == 0 || is_rooted(operation))
            check({operation, algorithm, size, count, root, hosts});
}

const Test kEveryPlan("the stages of every plan match, at every size", [] {
  for (int size = 1; size <= 17; ++size) check_all(size, {});
  check_all(33, {});
});

const Test kLanes("lanes of a ring match, and together send as many elements", [] {
  for (const Operation operation : kOperationsWithPlans)
    for (const Algorithm algorithm : algorithms_for(operation))
      for (const int size : {2, 3, 5})
        for (const size_t count : {size_t{1}, size_t{1000}, size_t{40'000}}) {
          if (algorithm != Algorithm::ring) continue;
          Case one{operation, algorithm, size, count, size - 1};
          size_t sent = 0;
          for (one.lanes = 3, one.lane = 0; one.lane < one.lanes; ++one.lane) {
            Streams(one).run();
            for (const StreamStage& stage : stages_of(one, 0).stages)
              for (const StreamStage::Message& message : stage.sends) sent += message.range.count;
          }
          expect_equal(sent, sent_by_plan(one, 0), one.text() + ": elements sent in all");
        }
});

const Test kHosts("stages match on several hosts", [] {
  check_all(4, {0, 0, 1, 1});
  check_all(7, {0, 0, 1, 1, 1, 2, 2});
});

const Test kRing("a ring has a stage for each step, a send to all has one", [] {
  for (int size = 2; size <= 8; ++size)  // with more ranks, gathers send tokens
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = static_cast<size_t>(size - 1);
      const auto stages = [&](const Plan& plan) {
        size_t with_messages = 0;
        for (const StreamStage& stage : make_stream_stages(plan, rank).stages)
          with_messages += stage.sends.empty() ? 0 : 1;
        return with_messages;
      };
      expect_equal(stages(ring_all_reduce(rank, size, 1000)), 2 * steps, "ring");
      expect_equal(stages(ring_all_gather({.rank = rank, .size = size, .count = 9})), steps,
                   "ring all_gather");
      expect_equal(stages(direct_all_reduce(rank, size, 1000)), size_t{1}, "direct");
    }
});

const Test kScratch("received summands are stored behind the plan's scratch, aligned", [] {
  // The root of the tree receives two in one stage.
  for (const Plan& plan : {ring_all_reduce(0, 3, 100), tree_all_reduce(0, 4, 100)}) {
    const StreamStages stages = make_stream_stages(plan, 0);
    for (const StreamStage& stage : stages.stages)
      for (const StreamStage::Step& step : stage.steps) {
        expect(step.arrived.space == Space::scratch, "in scratch");
        expect(step.arrived.begin >= plan.scratch, "behind the plan's");
        expect_equal(step.arrived.begin % 16, size_t{0}, "aligned");
        expect(step.arrived.begin + step.arrived.count <= stages.scratch, "counted");
      }
  }
});

}  // namespace
