// Selects the faster of two alternatives by trials while they are used: on a virtual machine the
// answer changes from minute to minute.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace pycomm::shared {

// Turns are numbered from 0. A trial is a series of turns that use both alternatives; the intervals
// between trials double up to a limit, and depend on the turns alone: ranks that count the same
// turns make the same trials.
class OnlineTuner {
 public:
  // `first`: turn of the first trial; `tries`: turns of each; `period`: limit from one trial to the
  // next.
  OnlineTuner(uint64_t first, uint64_t tries, uint64_t period)
      : tries_(tries), period_(period), begin_(first), interval_(2 * tries) {}

  // Call it before a call's first turn: ends trials of which turns are missing, as of a failed
  // call.
  void advance_to(uint64_t turn) {
    while (turn >= begin_ + tries_) end_trial();
  }
  bool tries(uint64_t turn) const { return turn >= begin_ && turn < begin_ + tries_; }
  // True: use the second alternative. The order in a trial is aperiodic, as calls may have a
  // period.
  bool uses_second(uint64_t turn) const { return tries(turn) ? tried(turn) == 1 : second_; }
  bool prefers_second() const { return second_; }

  // The cost of a turn of a trial; turns in ascending order.
  void record_cost(uint64_t turn, double cost) {
    costs_[tried(turn)].push_back(cost);
    if (turn == begin_ + tries_ - 1) end_trial();
  }

  uint64_t turns = 0;  // so far; the caller counts them

 private:
  size_t tried(uint64_t turn) const {
    return static_cast<size_t>(std::popcount(turn - begin_)) % 2;
  }

  // Unlike the minimum, the median does not follow one lucky turn.
  static double median(std::vector<double>& costs) {
    const auto middle = costs.begin() + static_cast<std::ptrdiff_t>(costs.size() / 2);
    std::ranges::nth_element(costs, middle);
    return *middle;
  }

  void end_trial() {
    if (!costs_[0].empty() && !costs_[1].empty()) second_ = median(costs_[1]) < median(costs_[0]);
    costs_ = {};
    begin_ += std::exchange(interval_, std::min(2 * interval_, period_));
  }

  uint64_t tries_, period_;
  uint64_t begin_, interval_;  // of the next trial, or the current one; to the one after it
  bool second_ = false;
  std::array<std::vector<double>, 2> costs_;  // of the current trial
};

}  // namespace pycomm::shared
