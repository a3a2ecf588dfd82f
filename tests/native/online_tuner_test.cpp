// The choice between two alternatives by trials (shared/online_tuner.h).
#include "shared/online_tuner.h"

#include <cstdint>
#include <string>
#include <vector>

#include "harness.h"

using namespace pycomm;

namespace {

// Records a turn that costs `first` or `second`, by the alternative that it uses.
void record(shared::OnlineTuner& tuner, double first, double second) {
  const uint64_t turn = tuner.turns++;
  if (tuner.tries(turn)) tuner.record_cost(turn, tuner.uses_second(turn) ? second : first);
}

const Test kTrials("the mode with the faster trials is used until the next trials", [] {
  shared::OnlineTuner tuner(0, 8, 64);
  std::vector<uint64_t> begins;
  for (uint64_t turn = 0; turn < 400; ++turn) {
    if (tuner.tries(turn) && (turn == 0 || !tuner.tries(turn - 1))) begins.push_back(turn);
    const bool even = begins.size() % 2 == 0;  // which one is faster changes with every trial
    if (!tuner.tries(turn))
      expect(tuner.uses_second(turn) == even, "the faster one of the last trial");
    if (tuner.tries(turn)) {
      const double luck = turn == begins.back() + 1 ? -0.9 : 0;
      tuner.record_cost(turn, (tuner.uses_second(turn) == even ? 1.0 : 2.0) + luck);
    }
  }
  expect(begins == std::vector<uint64_t>{0, 16, 48, 112, 176, 240, 304, 368}, "begins of trials");
});

const Test kMissing("a trial of which turns are missing ends", [] {
  shared::OnlineTuner tuner(0, 8, 256);
  for (int i = 0; i < 4; ++i) record(tuner, 2.0, 1.0);
  tuner.turns = 500;  // of calls that failed
  tuner.advance_to(tuner.turns);
  expect(tuner.prefers_second(), "the turns that were recorded count");
  while (tuner.turns < 900) record(tuner, 1.0, 2.0);
  expect(!tuner.prefers_second(), "later trials follow");
});

// Ranks that missed different turns must make the same trials from then on.
const Test kSkipped("skipped turns do not shift later trials", [] {
  shared::OnlineTuner each(0, 8, 256), last(0, 8, 256);
  for (uint64_t turn = 0; turn < 500; ++turn) each.advance_to(turn);
  for (uint64_t turn = 500; turn < 900; ++turn) {
    each.advance_to(turn);
    last.advance_to(turn);
    expect(each.tries(turn) == last.tries(turn), "turn " + std::to_string(turn));
  }
});

}  // namespace
