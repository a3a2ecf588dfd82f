// The bucket, and the channel that asks it.
#include "transport/throttled.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "os/fd.h"
#include "transport/frame.h"

namespace pycomm {
namespace {

// A frame must fit, or it would never be seen whole; more is a burst that a line would not have.
constexpr size_t kFrameBytes = sizeof(Header) + kSegmentBytes;
constexpr double kBurstBytes = 2.0 * kFrameBytes, kBurstS = 0.02;
// Fewer bytes than this are not worth waking up for.
constexpr size_t kGrain = size_t{16} << 10;
constexpr long kNapNs = 500'000;  // how long a bucket without that is left alone

class Throttled final : public Channel {
 public:
  Throttled(std::unique_ptr<Channel> inner, std::shared_ptr<Line> line)
      : inner_(std::move(inner)),
        line_(std::move(line)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    check(bool(timer_), "a timer for a throttled line");
  }

  std::string_view transport() const override { return inner_->transport(); }

  size_t send(ConstBytes head, ConstBytes body) override {
    if (inner_->hung_up()) return inner_->send(head, body);  // taken and lost
    const size_t may = line_->out.here();
    const ConstBytes first = head.first(std::min(head.size(), may));
    const ConstBytes second = body.first(std::min(body.size(), may - first.size()));
    if (first.empty() && second.empty()) return 0;
    const size_t n = inner_->send(first, second);
    line_->out.take(n);
    return n;
  }
  void expect_more(bool more) override { inner_->expect_more(more); }

  ConstBytes peek(size_t want) override {
    const size_t may = std::min(want, line_->in.here());
    const ConstBytes there = inner_->peek(may);
    held_back_ = may < want && there.size() >= may;
    return there.first(std::min(there.size(), may));
  }
  void take(size_t bytes) override {
    inner_->take(bytes);
    line_->in.take(bytes);
  }
  size_t receive(Bytes into) override {
    const size_t may = std::min(into.size(), line_->in.here());
    const size_t n = inner_->receive(into.first(may));
    held_back_ = may < into.size() && n == may;
    line_->in.take(n);
    return n;
  }

  bool hung_up() const override { return inner_->hung_up() && !held_back_; }
  std::string_view nonsense() const override { return inner_->nonsense(); }

  // What the line holds back lies ready beneath, and would wake a sleeper at once, again and again.
  pollfd arm(Want want) override {
    napping_ = (want.send && line_->out.here() < kGrain) ||
               (want.receive && line_->in.here() < std::clamp(want.bytes, kGrain, kFrameBytes));
    if (!napping_) return inner_->arm(want);
    const itimerspec when{{0, 0}, {0, kNapNs}};
    ::timerfd_settime(timer_.get(), 0, &when, nullptr);
    return {timer_.get(), POLLIN, 0};
  }
  void disarm(short revents) override {
    if (!napping_) inner_->disarm(revents);
  }

  void ring() override { inner_->ring(); }
  void hang_up(ConstBytes owed) override { inner_->hang_up(owed); }

 private:
  std::unique_ptr<Channel> inner_;
  std::shared_ptr<Line> line_;
  Fd timer_;
  bool napping_ = false;
  bool held_back_ = false;  // the line let less through than was asked for
};

}  // namespace

Bucket::Bucket(double bytes_per_s)
    : rate_(bytes_per_s), most_(std::max(kBurstBytes, kBurstS * bytes_per_s)), tokens_(most_) {
  if (!(bytes_per_s > 0)) throw InvalidArgument("a line of no speed");
}

size_t Bucket::here() {
  const std::scoped_lock lock(mutex_);
  const auto now = Clock::now();
  tokens_ = std::min(most_, tokens_ + rate_ * std::chrono::duration<double>(now - filled_).count());
  filled_ = now;
  return tokens_ > 0 ? static_cast<size_t>(tokens_) : 0;
}

void Bucket::take(size_t bytes) {
  const std::scoped_lock lock(mutex_);
  tokens_ -= static_cast<double>(bytes);
}

std::unique_ptr<Channel> make_throttled(std::unique_ptr<Channel> inner,
                                        std::shared_ptr<Line> line) {
  return std::make_unique<Throttled>(std::move(inner), std::move(line));
}

}  // namespace pycomm
