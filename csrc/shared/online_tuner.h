// Selects the faster of two alternatives by trials while they are used: on a virtual machine the
// answer changes from minute to minute.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace pycomm::shared {

// Turns are numbered from 0. A trial is a series of turns that use both alternatives; the intervals
// between trials double up to a limit, and depend on the turns alone: ranks that count the same
// turns make the same trials. A caller that records the cost of every turn gets a further trial
// when the alternative in use is slower than the other was at its best: either became slower, or a
// disturbance decided the last trial.
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

  // The cost of a turn; turns in ascending order.
  void record_cost(uint64_t turn, double cost) {
    if (tries(turn)) {
      costs_[tried(turn)].push_back(cost);
      if (turn == begin_ + tries_ - 1) end_trial();
      return;
    }
    recent_.push_back(cost);
    if (recent_.size() < patience_) return;
    if (median(recent_) > kSlower * best_[second_ ? 0 : 1]) {
      begin_ = turn + 1;
      interval_ = 2 * tries_;
      patience_ = std::min(2 * patience_, period_);  // until a trial changes the choice
    }
    recent_.clear();
  }

  uint64_t turns = 0;  // so far; the caller counts them

 private:
  static constexpr uint64_t kRecent = 8;
  static constexpr double kSlower = 1.25, kForget = 1.1;

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
    if (!costs_[0].empty() && !costs_[1].empty()) {
      const std::array costs{median(costs_[0]), median(costs_[1])};
      for (size_t i = 0; i < 2; ++i) best_[i] = std::min(costs[i], kForget * best_[i]);
      if (std::exchange(second_, costs[1] < costs[0]) != second_) patience_ = kRecent;
    }
    costs_ = {};
    recent_.clear();
    begin_ += std::exchange(interval_, std::min(2 * interval_, period_));
  }

  uint64_t tries_, period_;
  uint64_t begin_, interval_;  // of the next trial, or the current one; to the one after it
  bool second_ = false;
  std::array<std::vector<double>, 2> costs_;  // of the current trial
  std::array<double, 2> best_{std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::infinity()};  // of the last trials
  std::vector<double> recent_;   // costs since the trial, at most patience_
  uint64_t patience_ = kRecent;  // how many of them decide about a further trial
};

}  // namespace pycomm::shared
