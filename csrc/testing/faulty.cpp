#include "testing/faulty.h"

#include <fcntl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "core/errors.h"
#include "os/fd.h"
#include "testing/delayed_buffer.h"
#include "testing/frame_counter.h"

namespace pycomm::testing {
namespace {

class Faulty;

struct FaultState {
  Fault fault;
  uint64_t left = 0;         // bytes until it strikes
  bool struck = false;       // for delay, throttle and corrupt: in force
  bool timestamped = false;  // the time was written to the file
};

// Called before the fault has any effect, so that an observer of the effect finds the time there.
void write_timestamp(FaultState& state) {
  const std::string& path = state.fault.timestamp_file;
  if (path.empty() || std::exchange(state.timestamped, true)) return;
  const std::chrono::duration<double> now = Clock::now().time_since_epoch();
  const std::string text = std::to_string(now.count());
  const os::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file || ::write(file.get(), text.data(), text.size()) < 0)
    throw InvalidArgument("cannot write the time of a fault to '" + path +
                          "': " + std::generic_category().message(errno));
}

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

// The faults that concern the channel to one peer, with the frames of each direction.
class WatchedFaults {
 public:
  WatchedFaults(std::shared_ptr<Faults> faults, int peer) : faults_(std::move(faults)) {
    for (FaultState& state : faults_->states)
      if (state.fault.peer < 0 || state.fault.peer == peer) watched_.push_back({&state, {}, {}});
  }

  // A fault of this kind that struck; null: none.
  FaultState* in_force(FaultAction action) const {
    for (const Watched& watched : watched_)
      if (watched.state->struck && watched.state->fault.action == action) return watched.state;
    return nullptr;
  }

  // The bytes that may be sent until the first fault strikes, and that fault.
  std::pair<size_t, FaultState*> until_due(transport::ConstBytes head,
                                           transport::ConstBytes body) const {
    std::pair<size_t, FaultState*> first{head.size() + body.size(), nullptr};
    for (const Watched& watched : watched_) {
      if (watched.state->struck) continue;
      FrameCounter frames = watched.sent;
      uint64_t left = watched.state->left;
      auto result = frames.count(head, watched.state->fault.operation, left);
      if (!result.due) {
        result = frames.count(body, watched.state->fault.operation, left);
        result.bytes += head.size();
      }
      if (result.due && result.bytes <= first.first) first = {result.bytes, watched.state};
    }
    return first;
  }

  // Count transferred bytes; a fault that is due strikes.
  void count_sent(transport::ConstBytes bytes) { (void)count(bytes, &Watched::sent); }
  // Returns how many of the bytes precede a fault.
  size_t count_received(transport::ConstBytes bytes) { return count(bytes, &Watched::received); }

 private:
  struct Watched {
    FaultState* state;
    FrameCounter sent, received;
  };

  size_t count(transport::ConstBytes bytes, FrameCounter Watched::* direction) {
    size_t before = bytes.size();
    for (Watched& watched : watched_) {
      FaultState& state = *watched.state;
      if (state.struck) continue;
      const auto result = (watched.*direction).count(bytes, state.fault.operation, state.left);
      if (!result.due) continue;
      faults_->strike(state);
      before = std::min(before, result.bytes);
    }
    return before;
  }

  std::shared_ptr<Faults> faults_;
  std::vector<Watched> watched_;
};

// Noise that a channel sends once, between two frames.
class Noise {
 public:
  void follow(transport::ConstBytes sent) { frames_.skip(sent); }

  // Starts to send the noise if `state` is in force (not null). False while a part is to be sent.
  bool send(transport::Channel& channel, FaultState* state) {
    if (state != nullptr && !started_ && frames_.is_between_frames()) {
      write_timestamp(*state);
      started_ = true;
      left_ = kNoise.size();
    }
    if (left_ > 0) left_ -= channel.send(std::as_bytes(std::span(kNoise)).last(left_), {});
    return left_ == 0;
  }

 private:
  static constexpr std::string_view kNoise = "this is no frame of any version!";

  FrameCounter frames_;
  bool started_ = false;
  size_t left_ = 0;
};

class Faulty final : public transport::Channel {
 public:
  Faulty(std::unique_ptr<transport::Channel> inner, int peer, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)),
        transport_(inner_->transport()),
        peer_(peer),
        faults_(std::move(faults)),
        watched_(faults_, peer),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    faults_->channels.push_back(this);
  }
  Faulty(const Faulty&) = delete;
  Faulty& operator=(const Faulty&) = delete;
  ~Faulty() override { std::erase(faults_->channels, this); }

  int peer() const { return peer_; }
  void disconnect() { inner_.reset(); }

  std::string_view transport() const override { return transport_; }
  std::chrono::microseconds round_trip() const override {
    return inner_ ? inner_->round_trip() : std::chrono::microseconds{};
  }

  size_t send(transport::ConstBytes head, transport::ConstBytes body) override {
    const size_t total = head.size() + body.size();
    if (!inner_) return total;
    if (!noise_.send(*inner_, watched_.in_force(FaultAction::corrupt))) return 0;
    const auto [allowed, due] = watched_.until_due(head, body);
    const transport::ConstBytes first = head.first(std::min(head.size(), allowed));
    const transport::ConstBytes second = body.first(allowed - first.size());
    const size_t n = inner_->send(first, second);
    count_sent(first.first(std::min(n, first.size())));
    count_sent(second.first(n - std::min(n, first.size())));
    if (due != nullptr && n == allowed) faults_->strike(*due);
    if (!inner_) return total;
    if (n < allowed || n == total) return n;
    return n + send(head.subspan(first.size()), body.subspan(second.size()));
  }

  transport::ConstBytes peek(size_t want) override {
    pull();
    reveal();
    return arrived_.visible(want);
  }
  void take(size_t bytes) override { arrived_.take(bytes); }
  size_t receive(transport::Bytes into) override {
    const transport::ConstBytes here = peek(into.size());
    if (here.empty()) return 0;
    std::memcpy(into.data(), here.data(), here.size());
    take(here.size());
    return here.size();
  }

  bool is_closed() const override { return !inner_ || (ended_ && !arrived_.is_pending()); }
  std::string_view protocol_error() const override {
    return inner_ ? inner_->protocol_error() : "";
  }

  pollfd arm(transport::Want want) override {
    pull();
    if (!inner_) return {-1, 0, 0};
    armed_ = true;
    timed_ = arrived_.is_pending();
    if (!timed_) return inner_->arm({want.receive && !arrived_.is_full(), want.send});
    const int64_t ns = arrived_.until_next().count();
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
  void count_sent(transport::ConstBytes bytes) {
    noise_.follow(bytes);
    watched_.count_sent(bytes);
  }

  // Reads what has arrived.
  void pull() {
    if (!inner_) return;
    const bool last = inner_->is_closed();  // checked first: all that was sent before has arrived
    while (!arrived_.is_full()) {
      const transport::Bytes space = arrived_.free_space();
      const size_t n = inner_->receive(space);
      const size_t good = watched_.count_received(space.first(n));
      arrived_.add(inner_ ? n : good, delay());
      if (!inner_) return;
      if (n == 0) {
        ended_ = ended_ || last;
        return;
      }
    }
  }

  // Of bytes that arrive now. Between arm() and disarm() there is none, because nothing would wake
  // the rank later.
  std::optional<std::chrono::nanoseconds> delay() const {
    const FaultState* state = watched_.in_force(FaultAction::delay);
    if (armed_ || state == nullptr) return std::nullopt;
    return state->fault.delay;
  }

  void reveal() {
    const FaultState* state = watched_.in_force(FaultAction::throttle);
    const bool unwatched = armed_ && !timed_;  // nothing would wake the rank for later bytes
    arrived_.reveal(state == nullptr || unwatched ? SIZE_MAX : state->fault.chunk_bytes);
  }

  std::unique_ptr<transport::Channel> inner_;  // null: disconnected
  std::string_view transport_;
  int peer_;
  std::shared_ptr<Faults> faults_;
  WatchedFaults watched_;
  Noise noise_;
  DelayedBuffer arrived_;
  os::Fd timer_;
  bool ended_ = false, armed_ = false, timed_ = false;
};

}  // namespace

void Faults::strike(FaultState& state) {
  if (state.struck) return;
  state.struck = true;
  if (state.fault.action != FaultAction::corrupt) write_timestamp(state);  // noise is sent later
  switch (state.fault.action) {
    case FaultAction::disconnect:
      for (Faulty* channel : channels)
        if (state.fault.peer < 0 || channel->peer() == state.fault.peer) channel->disconnect();
      return;
    case FaultAction::kill:
      ::kill(::getpid(), SIGKILL);
      return;
    case FaultAction::stop:
      ::kill(::getpid(), SIGSTOP);
      return;
    case FaultAction::delay:
    case FaultAction::throttle:
    case FaultAction::corrupt:
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
