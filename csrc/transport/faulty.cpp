#include "transport/faulty.h"

#include <fcntl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <string>
#include <system_error>
#include <utility>

#include "core/errors.h"
#include "transport/frame.h"

namespace pycomm {
namespace {

constexpr size_t kHeldBytes = size_t{256} << 10;
constexpr size_t kPullBytes = size_t{64} << 10;

class Faulty;

struct Plan {
  Fault fault;
  uint64_t left = 0;    // bytes until it strikes
  bool struck = false;  // for delay, trickle and garbage: in force
  bool told = false;    // the file knows the moment
};

// Before others can have seen anything of it, so that who does finds the moment there.
void tell_moment(Plan& plan) {
  const std::string& path = plan.fault.moment_file;
  if (path.empty() || std::exchange(plan.told, true)) return;
  const std::chrono::duration<double> now = Clock::now().time_since_epoch();
  const std::string text = std::to_string(now.count());
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file || ::write(file.get(), text.data(), text.size()) < 0)
    throw InvalidArgument("the moment of a fault cannot be written to '" + path +
                          "': " + std::generic_category().message(errno));
}

// Follows a stream of frames through whatever pieces it comes in.
class Frames {
 public:
  struct Passed {
    size_t bytes = 0;
    bool due = false;
  };
  bool between() const { return have_ == 0; }

  // Takes what belongs to the plan off what is left of it; stops where nothing is left. The header
  // of a frame counts when it is whole, where the operation matters.
  Passed pass(ConstBytes bytes, Plan& plan) {
    for (size_t at = 0; at < bytes.size();) {
      const auto [n, counted] = step(bytes.subspan(at), plan.fault.operation);
      if (counted > 0 && counted >= plan.left) {
        const auto over = std::min<uint64_t>(n, counted - plan.left);
        plan.left = 0;
        return {at + n - static_cast<size_t>(over), true};
      }
      plan.left -= counted;
      at += n;
    }
    return {bytes.size(), false};
  }

 private:
  // Up to the end of a header or of a payload: the bytes, and those of them that count.
  std::pair<size_t, uint64_t> step(ConstBytes bytes, int operation) {
    size_t n = 0;
    const bool in_head = have_ < sizeof header_;
    if (in_head) {
      n = std::min(bytes.size(), sizeof header_ - have_);
      std::memcpy(reinterpret_cast<std::byte*>(&header_) + have_, bytes.data(), n);
      have_ += n;
      if (have_ == sizeof header_) payload_left_ = header_.bytes;
    } else {
      n = std::min<size_t>(bytes.size(), payload_left_);
      payload_left_ -= n;
    }
    const bool known = have_ == sizeof header_;
    const bool ours = known && header_.kind == FrameKind::data &&
                      static_cast<int>(header_.operation) == operation;
    if (known && payload_left_ == 0) have_ = 0;
    if (operation < 0) return {n, n};
    return {n, !ours ? 0 : in_head ? sizeof header_ : n};
  }

  Header header_{};
  size_t have_ = 0, payload_left_ = 0;
};

}  // namespace

class Faults {
 public:
  explicit Faults(const std::vector<Fault>& faults) {
    for (const Fault& fault : faults) plans.push_back({fault, fault.after_bytes});
  }
  void strike(Plan& plan);
  std::deque<Plan> plans;
  std::vector<Faulty*> channels{};
};

namespace {

class Faulty final : public Channel {
 public:
  Faulty(std::unique_ptr<Channel> inner, int peer, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)),
        transport_(inner_->transport()),
        peer_(peer),
        faults_(std::move(faults)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    faults_->channels.push_back(this);
    for (Plan& plan : faults_->plans)
      if (plan.fault.peer < 0 || plan.fault.peer == peer) watches_.push_back({&plan, {}, {}});
  }
  Faulty(const Faulty&) = delete;
  Faulty& operator=(const Faulty&) = delete;
  ~Faulty() override { std::erase(faults_->channels, this); }

  int peer() const { return peer_; }
  void cut() { inner_.reset(); }

  std::string_view transport() const override { return transport_; }

  size_t send(ConstBytes head, ConstBytes body) override {
    const size_t total = head.size() + body.size();
    if (!inner_) return total;
    if (!send_noise()) return 0;
    const auto [allowed, due] = until_due(head, body);
    const ConstBytes first = head.first(std::min(head.size(), allowed));
    const ConstBytes second = body.first(allowed - first.size());
    const size_t n = inner_->send(first, second);
    pass(first.first(std::min(n, first.size())), true);
    pass(second.first(n - std::min(n, first.size())), true);
    if (due != nullptr && n == allowed) faults_->strike(*due);
    if (!inner_) return total;
    if (n < allowed || n == total) return n;
    return n + send(head.subspan(first.size()), body.subspan(second.size()));
  }

  ConstBytes peek(size_t want) override {
    pull();
    reveal();
    return {held_.data() + begin_, std::min(want, shown_)};
  }
  void take(size_t bytes) override {
    begin_ += bytes;
    shown_ -= bytes;
    ripe_ -= bytes;
  }
  size_t receive(Bytes into) override {
    const ConstBytes here = peek(into.size());
    if (here.empty()) return 0;
    std::memcpy(into.data(), here.data(), here.size());
    take(here.size());
    return here.size();
  }

  bool hung_up() const override { return !inner_ || (ended_ && !pending()); }
  std::string_view nonsense() const override { return inner_ ? inner_->nonsense() : ""; }

  pollfd arm(Want want) override {
    pull();
    if (!inner_) return {-1, 0, 0};
    armed_ = true;
    timed_ = pending();
    if (!timed_)
      return inner_->arm({want.receive && held_.size() - begin_ < kHeldBytes, want.send});
    const auto wait =
        shown_ < ripe_ ? std::chrono::nanoseconds{1} : unripe_.front().at - Clock::now();
    const auto ns = std::max<int64_t>(1, std::chrono::nanoseconds(wait).count());
    const itimerspec when{{0, 0}, {ns / 1'000'000'000, ns % 1'000'000'000}};
    ::timerfd_settime(timer_.get(), 0, &when, nullptr);
    return {timer_.get(), POLLIN, 0};
  }
  void disarm(short revents) override {
    armed_ = false;
    if (inner_ && !timed_) inner_->disarm(revents);
    pull();
    reveal();
  }
  void hang_up(ConstBytes owed) override {
    if (inner_) inner_->hang_up(owed);
  }

 private:
  struct Watch {
    Plan* plan;
    Frames out, in;
  };
  struct Arrival {
    size_t bytes;
    Clock::time_point at;
  };

  Plan* in_force(FaultAction action) const {
    for (const Watch& watch : watches_)
      if (watch.plan->struck && watch.plan->fault.action == action) return watch.plan;
    return nullptr;
  }
  bool pending() const { return shown_ < ripe_ || !unripe_.empty(); }

  // How much may be sent until the first fault strikes, and which.
  std::pair<size_t, Plan*> until_due(ConstBytes head, ConstBytes body) const {
    std::pair<size_t, Plan*> first{head.size() + body.size(), nullptr};
    for (const Watch& watch : watches_) {
      if (watch.plan->struck) continue;
      Frames frames = watch.out;
      Plan trial = *watch.plan;
      auto passed = frames.pass(head, trial);
      if (!passed.due) {
        passed = frames.pass(body, trial);
        passed.bytes += head.size();
      }
      if (passed.due && passed.bytes <= first.first) first = {passed.bytes, watch.plan};
    }
    return first;
  }

  // Counts bytes that went; gives how many of them went before a fault struck.
  size_t pass(ConstBytes bytes, bool out) {
    size_t before = bytes.size();
    if (out) (void)sent_.pass(bytes, nothing_);
    for (Watch& watch : watches_) {
      if (watch.plan->struck) continue;
      const auto passed = (out ? watch.out : watch.in).pass(bytes, *watch.plan);
      if (!passed.due) continue;
      faults_->strike(*watch.plan);
      before = std::min(before, passed.bytes);
    }
    return before;
  }

  // False while noise that is to go out has not gone.
  bool send_noise() {
    if (noise_left_ == 0 && !noisy_ && sent_.between())
      if (Plan* plan = in_force(FaultAction::garbage)) {
        tell_moment(*plan);
        noisy_ = true;
        noise_left_ = kNoise.size();
      }
    if (noise_left_ > 0)
      noise_left_ -= inner_->send(std::as_bytes(std::span(kNoise)).last(noise_left_), {});
    return noise_left_ == 0;
  }

  // Takes in what has arrived.
  void pull() {
    if (!inner_) return;
    const bool last = inner_->hung_up();  // looked at first: what was sent before is there now
    if (begin_ >= kPullBytes || begin_ == held_.size()) {
      held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
    while (held_.size() - begin_ < kHeldBytes) {
      const size_t end = held_.size();
      held_.resize(end + kPullBytes);
      const size_t n = inner_->receive(Bytes(held_).subspan(end));
      const size_t good = pass(ConstBytes(held_).subspan(end, n), false);
      held_.resize(end + (inner_ ? n : good));
      if (held_.size() > end) ripen(held_.size() - end);
      if (!inner_) return;
      if (n == 0) {
        ended_ = ended_ || last;
        return;
      }
    }
  }

  // What comes between arm() and disarm() is there at once: for something later nobody would wake.
  void ripen(size_t bytes) {
    const Plan* plan = in_force(FaultAction::delay);
    if (armed_ || plan == nullptr) {
      while (!unripe_.empty()) {  // in order
        ripe_ += unripe_.front().bytes;
        unripe_.pop_front();
      }
      ripe_ += bytes;
    } else {
      unripe_.push_back({bytes, Clock::now() + plan->fault.delay});
    }
  }

  void reveal() {
    while (!unripe_.empty() && unripe_.front().at <= Clock::now()) {
      ripe_ += unripe_.front().bytes;
      unripe_.pop_front();
    }
    const Plan* plan = in_force(FaultAction::trickle);
    const bool unwatched = armed_ && !timed_;  // for bytes that come later nobody would wake
    shown_ = plan == nullptr || unwatched ? ripe_ : std::min(ripe_, shown_ + plan->fault.grain);
  }

  static constexpr std::string_view kNoise = "this is no frame of any version!";

  std::unique_ptr<Channel> inner_;  // null: cut
  std::string_view transport_;
  int peer_;
  std::shared_ptr<Faults> faults_;
  Fd timer_;
  std::vector<Watch> watches_;
  Frames sent_;
  Plan nothing_{{.operation = 256}, UINT64_MAX};
  bool noisy_ = false;
  size_t noise_left_ = 0;
  // What has arrived and was not taken: of the bytes from `begin_` on `ripe_` may be shown, and
  // `shown_` are.
  std::vector<std::byte> held_;
  size_t begin_ = 0, ripe_ = 0, shown_ = 0;
  std::deque<Arrival> unripe_;
  bool ended_ = false, armed_ = false, timed_ = false;
};

}  // namespace

void Faults::strike(Plan& plan) {
  if (plan.struck) return;
  plan.struck = true;
  if (plan.fault.action != FaultAction::garbage) tell_moment(plan);  // noise goes out later
  switch (plan.fault.action) {
    case FaultAction::cut:
      for (Faulty* channel : channels)
        if (plan.fault.peer < 0 || channel->peer() == plan.fault.peer) channel->cut();
      return;
    case FaultAction::kill:
      ::kill(::getpid(), SIGKILL);
      return;
    case FaultAction::stop:
      ::kill(::getpid(), SIGSTOP);
      return;
    case FaultAction::delay:
    case FaultAction::trickle:
    case FaultAction::garbage:
      return;
  }
}

std::shared_ptr<Faults> make_faults(const std::vector<Fault>& faults) {
  return std::make_shared<Faults>(faults);
}

std::unique_ptr<Channel> make_faulty(std::unique_ptr<Channel> inner, int peer,
                                     std::shared_ptr<Faults> faults) {
  return std::make_unique<Faulty>(std::move(inner), peer, std::move(faults));
}

}  // namespace pycomm
