// Selects the faster of two alternatives by timing both periodically: the first `tries` turns of
// every `period` are measurements. On a virtual machine the answer changes from minute to minute.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace pycomm::shared {

class OnlineTuner {
 public:
  OnlineTuner(uint64_t period, uint64_t tries) : period_(period), tries_(tries) {}

  bool tries(uint64_t turn) const { return turn % period_ < tries_; }
  // True: use the second alternative. The order of measurements is aperiodic, as calls may have a
  // period.
  bool uses_second(uint64_t turn) const { return tries(turn) ? tried(turn) == 1 : second_; }
  bool prefers_second() const { return second_; }

  // Cost of a measurement; turns in ascending order. The minimum of each alternative counts,
  // because disturbances only increase a cost.
  void record_cost(uint64_t turn, double cost) {
    if (turn % period_ == 0) least_.fill(std::numeric_limits<double>::infinity());
    double& least = least_[tried(turn)];
    least = std::min(least, cost);
    if (turn % period_ == tries_ - 1) second_ = least_[1] < least_[0];
  }

  uint64_t turns = 0;  // so far; the caller counts them

 private:
  size_t tried(uint64_t turn) const {
    return static_cast<size_t>(std::popcount(turn % period_)) % 2;
  }

  uint64_t period_, tries_;
  bool second_ = false;
  std::array<double, 2> least_{};  // of the current measurements
};

}  // namespace pycomm::shared
