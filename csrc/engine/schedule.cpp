#include "engine/schedule.h"

#include <utility>

namespace pycomm::engine {
namespace {

// `input` and `output` may be the same array; a write to one changes both.
bool same_memory(collectives::Space a, collectives::Space b) {
  return (a == collectives::Space::scratch) == (b == collectives::Space::scratch);
}

bool overlap(const collectives::Range& a, const collectives::Range& b) {
  return same_memory(a.space, b.space) && a.count > 0 && b.count > 0 &&
         a.begin < b.begin + b.count && b.begin < a.begin + a.count;
}

bool equal(const collectives::Range& a, const collectives::Range& b) {
  return a.space == b.space && a.begin == b.begin && a.count == b.count;
}

}  // namespace

Schedule make_schedule(collectives::Plan plan, int rank) {
  const auto& moves = plan.moves;
  std::vector<Needs> needs(moves.size());
  const auto last_before = [&](size_t i, auto holds) {
    auto at = static_cast<int>(i) - 1;
    while (at >= 0 && !holds(moves[static_cast<size_t>(at)])) --at;
    return at;
  };
  for (size_t i = 0; i < moves.size(); ++i) {
    const collectives::Move& move = moves[i];
    const bool sends = move.to != collectives::kNoRank && move.to != rank;
    if (sends) {
      const int at = last_before(i, [&](const collectives::Move& m) {
        return m.from != collectives::kNoRank && overlap(m.in, move.out);
      });
      const bool whole = at >= 0 && moves[static_cast<size_t>(at)].from != rank &&
                         equal(moves[static_cast<size_t>(at)].in, move.out);
      needs[i].send_after = at;
      needs[i].streams = whole;
    }
    if (move.from != collectives::kNoRank)
      needs[i].receive_after = last_before(i, [&](const collectives::Move& m) {
        return m.to != collectives::kNoRank && m.to != rank && overlap(m.out, move.in);
      });
  }
  return {std::move(plan), std::move(needs)};
}

}  // namespace pycomm::engine
