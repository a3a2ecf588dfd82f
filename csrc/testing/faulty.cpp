#include "testing/faulty.h"

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

namespace pycomm::testing {
namespace {

constexpr size_t kHeldBytes = size_t{256} << 10;
constexpr size_t kPullBytes = size_t{64} << 10;

class Faulty;

struct FaultState {
  Fault fault;
  uint64_t left = 0;         // bytes until it strikes
  bool struck = false;       // for delay, trickle and garbage: in force
  bool timestamped = false;  // the time was written to the file
};

// Called before the fault has any effect, so that an observer of the effect finds the time there.
void write_timestamp(FaultState& state) {
  const std::string& path = state.fault.moment_file;
  if (path.empty() || std::exchange(state.timestamped, true)) return;
  const std::chrono::duration<double> now = Clock::now().time_since_epoch();
  const std::string text = std::to_string(now.count());
  const os::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file || ::write(file.get(), text.data(), text.size()) < 0)
    throw InvalidArgument("cannot write the time of a fault to '" + path +
                          "': " + std::generic_category().message(errno));
}

// Parses a stream of frames that is passed in arbitrary pieces.
class Frames {
 public:
  struct CountedBytes {
    size_t bytes = 0;
    bool due = false;
  };
  bool between() const { return have_ == 0; }

  // Subtracts the bytes that count from `state.left`; stops where that becomes 0. If the operation
  // matters, the header of a frame counts when it is complete.
  CountedBytes pass(transport::ConstBytes bytes, FaultState& state) {
    for (size_t at = 0; at < bytes.size();) {
      const auto [n, counted] = step(bytes.subspan(at), state.fault.operation);
      if (counted > 0 && counted >= state.left) {
        const auto over = std::min<uint64_t>(n, counted - state.left);
        state.left = 0;
        return {at + n - static_cast<size_t>(over), true};
      }
      state.left -= counted;
      at += n;
    }
    return {bytes.size(), false};
  }

 private:
  // Advances to the end of a header or of a payload: the bytes, and how many of them count.
  std::pair<size_t, uint64_t> step(transport::ConstBytes bytes, int operation) {
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
    const bool ours = known && header_.kind == transport::FrameKind::data &&
                      static_cast<int>(header_.operation) == operation;
    if (known && payload_left_ == 0) have_ = 0;
    if (operation < 0) return {n, n};
    return {n, !ours ? 0 : in_head ? sizeof header_ : n};
  }

  transport::Header header_{};
  size_t have_ = 0, payload_left_ = 0;
};

}  // namespace

class Faults {
 public:
  explicit Faults(const std::vector<Fault>& faults) {
    for (const Fault& fault : faults) states.push_back({fault, fault.after_bytes});
  }
  void strike(FaultState& state);
  std::deque<FaultState> states;
  std::vector<Faulty*> channels{};
};

namespace {

class Faulty final : public transport::Channel {
 public:
  Faulty(std::unique_ptr<transport::Channel> inner, int peer, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)),
        transport_(inner_->transport()),
        peer_(peer),
        faults_(std::move(faults)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    faults_->channels.push_back(this);
    for (FaultState& state : faults_->states)
      if (state.fault.peer < 0 || state.fault.peer == peer) watched_.push_back({&state, {}, {}});
  }
  Faulty(const Faulty&) = delete;
  Faulty& operator=(const Faulty&) = delete;
  ~Faulty() override { std::erase(faults_->channels, this); }

  int peer() const { return peer_; }
  void cut() { inner_.reset(); }

  std::string_view transport() const override { return transport_; }

  size_t send(transport::ConstBytes head, transport::ConstBytes body) override {
    const size_t total = head.size() + body.size();
    if (!inner_) return total;
    if (!send_noise()) return 0;
    const auto [allowed, due] = until_due(head, body);
    const transport::ConstBytes first = head.first(std::min(head.size(), allowed));
    const transport::ConstBytes second = body.first(allowed - first.size());
    const size_t n = inner_->send(first, second);
    pass(first.first(std::min(n, first.size())), true);
    pass(second.first(n - std::min(n, first.size())), true);
    if (due != nullptr && n == allowed) faults_->strike(*due);
    if (!inner_) return total;
    if (n < allowed || n == total) return n;
    return n + send(head.subspan(first.size()), body.subspan(second.size()));
  }

  transport::ConstBytes peek(size_t want) override {
    pull();
    reveal();
    return {held_.data() + begin_, std::min(want, shown_)};
  }
  void take(size_t bytes) override {
    begin_ += bytes;
    shown_ -= bytes;
    due_ -= bytes;
  }
  size_t receive(transport::Bytes into) override {
    const transport::ConstBytes here = peek(into.size());
    if (here.empty()) return 0;
    std::memcpy(into.data(), here.data(), here.size());
    take(here.size());
    return here.size();
  }

  bool is_closed() const override { return !inner_ || (ended_ && !pending()); }
  std::string_view protocol_error() const override {
    return inner_ ? inner_->protocol_error() : "";
  }

  pollfd arm(transport::Want want) override {
    pull();
    if (!inner_) return {-1, 0, 0};
    armed_ = true;
    timed_ = pending();
    if (!timed_)
      return inner_->arm({want.receive && held_.size() - begin_ < kHeldBytes, want.send});
    const auto wait =
        shown_ < due_ ? std::chrono::nanoseconds{1} : delayed_.front().at - Clock::now();
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
  void close(transport::ConstBytes unsent) override {
    if (inner_) inner_->close(unsent);
  }

 private:
  struct WatchedFault {
    FaultState* state;
    Frames out, in;
  };
  struct DelayedBytes {
    size_t bytes;
    Clock::time_point at;
  };

  FaultState* in_force(FaultAction action) const {
    for (const WatchedFault& watched : watched_)
      if (watched.state->struck && watched.state->fault.action == action) return watched.state;
    return nullptr;
  }
  bool pending() const { return shown_ < due_ || !delayed_.empty(); }

  // The bytes that may be sent until the first fault strikes, and that fault.
  std::pair<size_t, FaultState*> until_due(transport::ConstBytes head,
                                           transport::ConstBytes body) const {
    std::pair<size_t, FaultState*> first{head.size() + body.size(), nullptr};
    for (const WatchedFault& watched : watched_) {
      if (watched.state->struck) continue;
      Frames frames = watched.out;
      FaultState trial = *watched.state;
      auto result = frames.pass(head, trial);
      if (!result.due) {
        result = frames.pass(body, trial);
        result.bytes += head.size();
      }
      if (result.due && result.bytes <= first.first) first = {result.bytes, watched.state};
    }
    return first;
  }

  // Counts transferred bytes; returns how many of them precede a fault.
  size_t pass(transport::ConstBytes bytes, bool out) {
    size_t before = bytes.size();
    if (out) (void)sent_.pass(bytes, nothing_);
    for (WatchedFault& watched : watched_) {
      if (watched.state->struck) continue;
      const auto result = (out ? watched.out : watched.in).pass(bytes, *watched.state);
      if (!result.due) continue;
      faults_->strike(*watched.state);
      before = std::min(before, result.bytes);
    }
    return before;
  }

  // False while noise is still to be sent.
  bool send_noise() {
    if (noise_left_ == 0 && !noisy_ && sent_.between())
      if (FaultState* state = in_force(FaultAction::garbage)) {
        write_timestamp(*state);
        noisy_ = true;
        noise_left_ = kNoise.size();
      }
    if (noise_left_ > 0)
      noise_left_ -= inner_->send(std::as_bytes(std::span(kNoise)).last(noise_left_), {});
    return noise_left_ == 0;
  }

  // Reads what has arrived.
  void pull() {
    if (!inner_) return;
    const bool last = inner_->is_closed();  // checked first: all that was sent before has arrived
    if (begin_ >= kPullBytes || begin_ == held_.size()) {
      held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
    while (held_.size() - begin_ < kHeldBytes) {
      const size_t end = held_.size();
      held_.resize(end + kPullBytes);
      const size_t n = inner_->receive(transport::Bytes(held_).subspan(end));
      const size_t good = pass(transport::ConstBytes(held_).subspan(end, n), false);
      held_.resize(end + (inner_ ? n : good));
      if (held_.size() > end) schedule(held_.size() - end);
      if (!inner_) return;
      if (n == 0) {
        ended_ = ended_ || last;
        return;
      }
    }
  }

  // Decides when new bytes become visible. Between arm() and disarm() that is immediately, because
  // nothing would wake the rank later.
  void schedule(size_t bytes) {
    const FaultState* state = in_force(FaultAction::delay);
    if (armed_ || state == nullptr) {
      while (!delayed_.empty()) {  // in order
        due_ += delayed_.front().bytes;
        delayed_.pop_front();
      }
      due_ += bytes;
    } else {
      delayed_.push_back({bytes, Clock::now() + state->fault.delay});
    }
  }

  void reveal() {
    while (!delayed_.empty() && delayed_.front().at <= Clock::now()) {
      due_ += delayed_.front().bytes;
      delayed_.pop_front();
    }
    const FaultState* state = in_force(FaultAction::trickle);
    const bool unwatched = armed_ && !timed_;  // nothing would wake the rank for later bytes
    shown_ = state == nullptr || unwatched ? due_ : std::min(due_, shown_ + state->fault.grain);
  }

  static constexpr std::string_view kNoise = "this is no frame of any version!";

  std::unique_ptr<transport::Channel> inner_;  // null: disconnected
  std::string_view transport_;
  int peer_;
  std::shared_ptr<Faults> faults_;
  os::Fd timer_;
  std::vector<WatchedFault> watched_;
  Frames sent_;
  FaultState nothing_{{.operation = 256}, UINT64_MAX};
  bool noisy_ = false;
  size_t noise_left_ = 0;
  // Bytes that have arrived and were not taken. From `begin_` on, `due_` bytes may become visible,
  // and `shown_` are visible.
  std::vector<std::byte> held_;
  size_t begin_ = 0, due_ = 0, shown_ = 0;
  std::deque<DelayedBytes> delayed_;
  bool ended_ = false, armed_ = false, timed_ = false;
};

}  // namespace

void Faults::strike(FaultState& state) {
  if (state.struck) return;
  state.struck = true;
  if (state.fault.action != FaultAction::garbage) write_timestamp(state);  // noise is sent later
  switch (state.fault.action) {
    case FaultAction::cut:
      for (Faulty* channel : channels)
        if (state.fault.peer < 0 || channel->peer() == state.fault.peer) channel->cut();
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

std::unique_ptr<transport::Channel> make_faulty(std::unique_ptr<transport::Channel> inner, int peer,
                                                std::shared_ptr<Faults> faults) {
  return std::make_unique<Faulty>(std::move(inner), peer, std::move(faults));
}

std::function<std::unique_ptr<transport::Channel>(std::unique_ptr<transport::Channel>, int peer)>
fault_injector(const std::vector<Fault>& faults) {
  return [state = make_faults(faults)](std::unique_ptr<transport::Channel> inner, int peer) {
    return make_faulty(std::move(inner), peer, state);
  };
}

}  // namespace pycomm::testing
