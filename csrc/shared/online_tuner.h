// Which of two alternatives is faster here, measured by trying both from time to time: of every
// period the first few turns are tries. Of a virtual machine the answer changes from minute to
// minute.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace pycomm {

class OnlineTuner {
 public:
  OnlineTuner(uint64_t period, uint64_t tries) : period_(period), tries_(tries) {}

  bool tries(uint64_t turn) const { return turn % period_ < tries_; }
  // True: the second alternative. Tries change in an order without a period, as calls may have one.
  bool uses_second(uint64_t turn) const { return tries(turn) ? tried(turn) == 1 : second_; }
  bool prefers_second() const { return second_; }

  // What a try cost, turns in their order. The least of each way counts: nothing makes a turn cost
  // too little.
  void record_cost(uint64_t turn, double cost) {
    if (turn % period_ == 0) least_.fill(std::numeric_limits<double>::infinity());
    double& least = least_[tried(turn)];
    least = std::min(least, cost);
    if (turn % period_ == tries_ - 1) second_ = least_[1] < least_[0];
  }

  uint64_t turns = 0;  // so far, as the user counts them

 private:
  size_t tried(uint64_t turn) const {
    return static_cast<size_t>(std::popcount(turn % period_)) % 2;
  }

  uint64_t period_, tries_;
  bool second_ = false;
  std::array<double, 2> least_{};  // of the tries under way
};

}  // namespace pycomm
