// Peers that keep a rank busy without end do not delay a signal, a call's limit, an abort, or its
// heartbeats.
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/operation.h"
#include "engine/engine.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;
using ranks::Ending;
using ranks::ending_of;
using ranks::kSlowdown;

constexpr auto kHeartbeat = kSlowdown > 1 ? 2s : 1s;
constexpr double kSoon = 1.0 * kSlowdown;  // seconds; a call that ignores its limit never ends

// A peer whose bytes never end.
class Endless : public transport::Channel {
 public:
  std::string_view transport() const override { return "endless"; }
  size_t send(transport::ConstBytes head, transport::ConstBytes body) override {
    return head.size() + body.size();
  }
  void take(size_t) override {}
  bool is_closed() const override { return false; }
  void disarm(short) override {}
  void close(transport::ConstBytes) override {}

 protected:
  static transport::Header message() {
    return {.operation = static_cast<uint8_t>(Operation::send),
            .bytes = transport::kSegmentBytes,
            .count = size_t{1} << 40};
  }
};

// One byte of a message arrives whenever the rank is about to sleep.
class Drip final : public Endless {
 public:
  transport::ConstBytes peek(size_t) override { return {}; }
  size_t receive(transport::Bytes into) override {
    if (!std::exchange(here_, false)) return 0;
    into[0] = sent_ < sizeof(transport::Header)
                  ? reinterpret_cast<const std::byte*>(&header_)[sent_]
                  : std::byte{0};
    sent_ = (sent_ + 1) % (sizeof(transport::Header) + transport::kSegmentBytes);
    return 1;
  }
  pollfd arm(transport::Want) override {
    here_ = true;
    return {-1, 0, 0};
  }

 private:
  transport::Header header_ = message();
  size_t sent_ = 0;
  bool here_ = false;
};

// Frames of a call that failed before, as fast as they are received.
class Flood final : public Endless {
 public:
  transport::ConstBytes peek(size_t) override { return {}; }
  size_t receive(transport::Bytes into) override {
    transport::Header header = message();
    header.epoch = UINT16_MAX;
    header.bytes = 0;
    header.operation = static_cast<uint8_t>(Operation::barrier);
    const size_t n = std::min(into.size(), sizeof header - sent_);
    std::memcpy(into.data(), reinterpret_cast<const std::byte*>(&header) + sent_, n);
    sent_ = (sent_ + n) % sizeof header;
    return n;
  }
  pollfd arm(transport::Want) override { return {-1, 0, 0}; }

 private:
  size_t sent_ = 0;
};

// A call that makes a step whenever its rank is about to sleep.
class Crawl final : public engine::Task {
 public:
  bool advance() override { return std::exchange(ready_, false); }
  bool done() const override { return false; }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override { return collectives::kNoRank; }
  void arm() override { ready_ = true; }

 private:
  bool ready_ = false;
};

using Wait = std::function<void(engine::Engine&, const Deadline&)>;

// The ways in which rank 1 of two keeps rank 0 busy while it waits.
struct Busy {
  std::string how;
  std::function<std::unique_ptr<transport::Channel>()> channel;
  Wait wait;
};

void wait_for_message(engine::Engine& engine, const Deadline& deadline) {
  std::byte into{};
  (void)engine.messenger().receive(
      1, {.operation = static_cast<uint8_t>(Operation::send), .count = 1}, {&into, 1}, deadline);
}

std::vector<Busy> all_busy() {
  const Wait crawl = [](engine::Engine& engine, const Deadline& deadline) {
    Crawl task;
    engine.run(task, engine.next_header({}), deadline);
  };
  return {
      {"its bytes arrive one at a time", [] { return std::make_unique<Drip>(); }, wait_for_message},
      {"it floods", [] { return std::make_unique<Flood>(); }, wait_for_message},
      {"the call makes tiny steps", [] { return std::make_unique<Flood>(); }, crawl}};
}

std::unique_ptr<engine::Engine> engine_of(std::unique_ptr<transport::Channel> channel,
                                          std::function<bool()> interrupted = {}) {
  engine::EngineOptions options{
      .rank = 0, .names = {"rank 0", "rank 1"}, .interrupted = std::move(interrupted)};
  std::vector<std::unique_ptr<transport::Channel>> channels(2);
  channels[1] = std::move(channel);
  return std::make_unique<engine::Engine>(std::move(channels), std::move(options));
}

void expect_end(const Ending& ending, ErrorKind kind, const Busy& busy, double limit_s) {
  expect(ending.is(kind), busy.how + ": " + ending.text());
  expect(ending.seconds < limit_s, busy.how + ": it took " + std::to_string(ending.seconds) + " s");
}

const Test kLimit{"a busy peer does not delay the call's limit", [] {
                    for (const Busy& busy : all_busy()) {
                      const auto engine = engine_of(busy.channel());
                      const auto ending = ending_of([&] { busy.wait(*engine, Deadline(200ms)); });
                      // And the second by which a call may pass its limit.
                      expect_end(ending, ErrorKind::timeout, busy, 0.2 + kSoon);
                    }
                  }};

const Test kSignal{"a busy peer does not delay a signal", [] {
                     for (const Busy& busy : all_busy()) {
                       const auto engine = engine_of(busy.channel(), [] { return true; });
                       const auto ending = ending_of([&] { busy.wait(*engine, Deadline(1h)); });
                       expect_end(ending, ErrorKind::group_broken, busy, kSoon);
                       expect(ending.says("rank 0 was interrupted"), ending.text());
                     }
                   }};

const Test kAbort{"a busy peer does not delay an abort", [] {
                    for (const Busy& busy : all_busy()) {
                      std::promise<void> begun;
                      // Asked once the call waits.
                      const auto engine = engine_of(busy.channel(), [&, told = false]() mutable {
                        if (!std::exchange(told, true)) begun.set_value();
                        return false;
                      });
                      std::thread other([&] {
                        begun.get_future().wait();
                        engine->stop("enough");
                      });
                      const auto ending = ending_of([&] { busy.wait(*engine, Deadline(1h)); });
                      other.join();
                      expect_end(ending, ErrorKind::group_broken, busy, kSoon);
                      expect(ending.says("enough"), ending.text());
                    }
                  }};

// Rank 0 waits for rank 2, which keeps it busy, and rank 1 for rank 0.
const Test kAccused{
    "a rank that a peer keeps busy is not taken for dead", [] {
      for (const Busy& busy : all_busy())
        for (const std::string by : {"shm", "tcp"}) {
          auto [a, b] = ranks::channel_pair(by, size_t{64} << 10);
          const std::vector<std::string> names{"rank 0", "rank 1", "rank 2"};
          std::vector<std::unique_ptr<transport::Channel>> of_busy(3), of_waiting(3);
          of_busy[1] = std::move(a);
          of_busy[2] = busy.channel();
          of_waiting[0] = std::move(b);
          engine::Engine middle(
              std::move(of_busy),
              {.rank = 0, .names = names, .heartbeat = kHeartbeat, .interrupted = {}});
          engine::Engine waits(
              std::move(of_waiting),
              {.rank = 1, .names = names, .heartbeat = kHeartbeat, .interrupted = {}});
          auto works = std::async(std::launch::async, [&] {
            return ending_of([&] {
              std::byte into{};
              if (busy.how == "the call makes tiny steps") return busy.wait(middle, Deadline(1h));
              (void)middle.messenger().receive(
                  2, {.operation = static_cast<uint8_t>(Operation::send), .count = 1}, {&into, 1},
                  Deadline(1h));
            });
          });
          std::byte into{};
          const Ending ending = ending_of([&] {
            (void)waits.messenger().receive(
                0, {.operation = static_cast<uint8_t>(Operation::send), .count = 1}, {&into, 1},
                Deadline(3 * kHeartbeat));
          });
          middle.stop("enough");
          (void)works.get();
          expect(ending.is(ErrorKind::timeout), busy.how + ", " + by + ": " + ending.text());
        }
    }};

}  // namespace
