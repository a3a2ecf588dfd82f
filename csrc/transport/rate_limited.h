// Channels behind a link of a given speed, where the system cannot limit it (tc needs root): a
// token bucket in each direction, which all channels of a rank share, those of its subgroups too.
// For benchmarks. Bytes are those of frames: what TCP and IP add does not count.
//
// group/connect.cpp puts it around the channels of a group whose options name a link.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>

#include "transport/transport.h"

namespace pycomm {

// Fills at so many bytes a second, up to a burst. Used by any thread.
class TokenBucket {
 public:
  explicit TokenBucket(double bytes_per_s);
  // What may pass now.
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

// `inner` behind `link`.
std::unique_ptr<Channel> make_rate_limited(std::unique_ptr<Channel> inner,
                                           std::shared_ptr<RateLimitedLink> link);

}  // namespace pycomm
