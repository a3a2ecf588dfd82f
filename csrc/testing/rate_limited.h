// Channels with a limited rate, for benchmarks without root (which tc needs): a token bucket for
// each direction, shared by all channels of a rank, including those of its subgroups. It counts the
// bytes of frames, without the overhead of TCP and IP.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "transport/transport.h"

namespace pycomm::testing {

// Fills at `bytes_per_s`, up to a burst. Thread-safe.
class TokenBucket {
 public:
  explicit TokenBucket(double bytes_per_s);
  // The bytes that may pass now.
  size_t available();
  void take(size_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  double rate_, most_, tokens_;
  Clock::time_point filled_ = Clock::now();
};

struct RateLimitedLink {
  explicit RateLimitedLink(double bytes_per_s) : out(bytes_per_s), in(bytes_per_s) {}
  TokenBucket out, in;
};

// `inner`, limited by `link`.
std::unique_ptr<transport::Channel> make_rate_limited(std::unique_ptr<transport::Channel> inner,
                                                      std::shared_ptr<RateLimitedLink> link);

// make_rate_limited() with one link of this rate for all channels, for a group's options.
std::function<std::unique_ptr<transport::Channel>(std::unique_ptr<transport::Channel>, int peer)>
rate_limiter(double bytes_per_s);

}  // namespace pycomm::testing
