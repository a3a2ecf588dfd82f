// See rate_limited.h.
#include "testing/rate_limited.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "os/fd.h"
#include "transport/frame.h"

namespace pycomm::testing {
namespace {

// A frame must fit, or it would never arrive completely; a larger burst would be unrealistic.
constexpr size_t kFrameBytes = sizeof(transport::Header) + transport::kSegmentBytes;
constexpr double kBurstBytes = 2.0 * kFrameBytes, kBurstS = 0.02;
// Minimum bytes for a wake-up.
constexpr size_t kWakeupBytes = size_t{16} << 10;
constexpr long kTimerNs = 500'000;  // sleep while the bucket holds less than that

class RateLimited final : public transport::Channel {
 public:
  RateLimited(std::unique_ptr<transport::Channel> inner, std::shared_ptr<RateLimitedLink> link)
      : inner_(std::move(inner)),
        link_(std::move(link)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    check(bool(timer_), "no timer for a rate-limited link");
  }

  std::string_view transport() const override { return inner_->transport(); }
  std::chrono::microseconds round_trip() const override { return inner_->round_trip(); }

  size_t send(transport::ConstBytes head, transport::ConstBytes body) override {
    if (inner_->is_closed()) return inner_->send(head, body);  // taken and lost
    const size_t may = link_->out.available();
    const transport::ConstBytes first = head.first(std::min(head.size(), may));
    const transport::ConstBytes second = body.first(std::min(body.size(), may - first.size()));
    if (first.empty() && second.empty()) return 0;
    const size_t n = inner_->send(first, second);
    link_->out.take(n);
    return n;
  }
  void expect_more(bool more) override { inner_->expect_more(more); }

  transport::ConstBytes peek(size_t want) override { return inner_->peek(readable(want)); }
  void take(size_t bytes) override {
    inner_->take(bytes);
    link_->in.take(bytes);
  }
  size_t receive(transport::Bytes into) override {
    const size_t n = inner_->receive(into.first(readable(into.size())));
    link_->in.take(n);
    return n;
  }

  bool is_closed() const override { return inner_->is_closed(); }
  std::string_view protocol_error() const override { return inner_->protocol_error(); }

  // Bytes that the link holds back are ready in `inner_`, and would end each sleep immediately.
  pollfd arm(transport::Want want) override {
    timer_armed_ =
        (want.send && link_->out.available() < kWakeupBytes) ||
        (want.receive && link_->in.available() < std::clamp(want.bytes, kWakeupBytes, kFrameBytes));
    if (!timer_armed_) return inner_->arm(want);
    const itimerspec when{{0, 0}, {0, kTimerNs}};
    ::timerfd_settime(timer_.get(), 0, &when, nullptr);
    return {timer_.get(), POLLIN, 0};
  }
  void disarm(short revents) override {
    if (!timer_armed_) inner_->disarm(revents);
  }

  void wake_peer() override { inner_->wake_peer(); }
  void close(transport::ConstBytes unsent) override { inner_->close(unsent); }

 private:
  // After the peer closed, a reader considers bytes lost that have not arrived, so none are held
  // back then.
  size_t readable(size_t want) {
    return inner_->is_closed() ? want : std::min(want, link_->in.available());
  }

  std::unique_ptr<transport::Channel> inner_;
  std::shared_ptr<RateLimitedLink> link_;
  os::Fd timer_;
  bool timer_armed_ = false;
};

}  // namespace

TokenBucket::TokenBucket(double bytes_per_s)
    : rate_(bytes_per_s), most_(std::max(kBurstBytes, kBurstS * bytes_per_s)), tokens_(most_) {
  if (!(bytes_per_s > 0))
    throw InvalidArgument("the rate of a link must be positive, got " +
                          std::to_string(bytes_per_s) + " bytes/s");
}

size_t TokenBucket::available() {
  const std::scoped_lock lock(mutex_);
  const auto now = Clock::now();
  tokens_ = std::min(most_, tokens_ + rate_ * std::chrono::duration<double>(now - filled_).count());
  filled_ = now;
  return tokens_ > 0 ? static_cast<size_t>(tokens_) : 0;
}

void TokenBucket::take(size_t bytes) {
  const std::scoped_lock lock(mutex_);
  tokens_ -= static_cast<double>(bytes);
}

std::unique_ptr<transport::Channel> make_rate_limited(std::unique_ptr<transport::Channel> inner,
                                                      std::shared_ptr<RateLimitedLink> link) {
  return std::make_unique<RateLimited>(std::move(inner), std::move(link));
}

std::function<std::unique_ptr<transport::Channel>(std::unique_ptr<transport::Channel>, int peer)>
rate_limiter(double bytes_per_s) {
  const auto link = std::make_shared<RateLimitedLink>(bytes_per_s);
  return [link](std::unique_ptr<transport::Channel> inner, int) {
    return make_rate_limited(std::move(inner), link);
  };
}

}  // namespace pycomm::testing
