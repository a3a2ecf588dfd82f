// The time at which a wait must end.
#pragma once

#include <algorithm>
#include <chrono>

namespace pycomm {

using Clock = std::chrono::steady_clock;

// Longest wait before a waiting call checks whether it was interrupted.
inline constexpr std::chrono::milliseconds kPollInterval{100};

class Deadline {
 public:
  explicit Deadline(std::chrono::nanoseconds limit) : Deadline(Clock::now(), limit) {}
  // Relative to an earlier time.
  Deadline(Clock::time_point start, std::chrono::nanoseconds limit)
      : start_(start), end_(start + limit) {}
  Clock::time_point start() const { return start_; }
  bool expired() const { return Clock::now() >= end_; }
  std::chrono::nanoseconds left() const {
    return std::max(std::chrono::nanoseconds{0},
                    std::chrono::duration_cast<std::chrono::nanoseconds>(end_ - Clock::now()));
  }
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double limit_s() const { return std::chrono::duration<double>(end_ - start_).count(); }

 private:
  Clock::time_point start_, end_;
};

}  // namespace pycomm
