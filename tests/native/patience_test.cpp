// Peers that keep a rank busy without end do not delay a signal, a call's limit, an abort, or its
// heartbeats.
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
#include "played_channels.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::engine;
using namespace pycomm::transport;
using namespace std::chrono_literals;
using ranks::Ending;
using ranks::ending_of;
using ranks::kSlowdown;

constexpr auto kHeartbeat = kSlowdown > 1 ? 2s : 1s;
constexpr double kSoon = 1.0 * kSlowdown;  // seconds; a call that ignores its limit never ends

// A peer whose bytes never end.
class Endless : public played::PlayedChannel {
 protected:
  static Header message() {
    return {.operation = static_cast<uint8_t>(Operation::send),
            .bytes = kSegmentBytes,
            .count = size_t{1} << 40};
  }
};

// One byte of a message arrives whenever the rank is about to sleep.
class Drip final : public Endless {
 public:
  size_t receive(Bytes into) override {
    if (!std::exchange(here_, false)) return 0;
    into[0] =
        sent_ < sizeof(Header) ? reinterpret_cast<const std::byte*>(&header_)[sent_] : std::byte{0};
    sent_ = (sent_ + 1) % (sizeof(Header) + kSegmentBytes);
    return 1;
  }
  pollfd arm(Want) override {
    here_ = true;
    return {-1, 0, 0};
  }

 private:
  Header header_ = message();
  size_t sent_ = 0;
  bool here_ = false;
};

// Frames of a call that failed before, as fast as they are received.
class Flood final : public Endless {
 public:
  size_t receive(Bytes into) override {
    Header header = message();
    header.epoch = UINT16_MAX;
    header.bytes = 0;
    header.operation = static_cast<uint8_t>(Operation::barrier);
    const size_t n = std::min(into.size(), sizeof header - sent_);
    std::memcpy(into.data(), reinterpret_cast<const std::byte*>(&header) + sent_, n);
    sent_ = (sent_ + n) % sizeof header;
    return n;
  }

 private:
  size_t sent_ = 0;
};

// A call that makes a step whenever its rank is about to sleep.
class Crawl final : public Task {
 public:
  bool advance() override { return std::exchange(ready_, false); }
  bool done() const override { return false; }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override { return collectives::kNoRank; }
  void arm() override { ready_ = true; }

 private:
  bool ready_ = false;
};

using Wait = std::function<void(Engine&, const Deadline&)>;

// The ways in which rank 1 of two keeps rank 0 busy while it waits.
struct Busy {
  std::string how;
  std::function<std::unique_ptr<Channel>()> channel;
  Wait wait;
};

void wait_for_message(Engine& engine, const Deadline& deadline) {
  std::byte into{};
  (void)engine.messenger().receive(
      1, {.operation = static_cast<uint8_t>(Operation::send), .count = 1}, {&into, 1}, deadline);
}

std::vector<Busy> all_busy() {
  const Wait crawl = [](Engine& engine, const Deadline& deadline) {
    Crawl task;
    engine.run(task, engine.next_header({}), deadline);
  };
  return {
      {"its bytes arrive one at a time", [] { return std::make_unique<Drip>(); }, wait_for_message},
      {"it floods", [] { return std::make_unique<Flood>(); }, wait_for_message},
      {"the call makes tiny steps", [] { return std::make_unique<Flood>(); }, crawl}};
}

void expect_end(const Ending& ending, ErrorKind kind, const Busy& busy, double limit_s) {
  expect(ending.is(kind), busy.how + ": " + ending.text());
  expect(ending.seconds < limit_s, busy.how + ": it took " + std::to_string(ending.seconds) + " s");
}

const Test kLimit("a busy peer does not delay the call's limit", [] {
  for (const Busy& busy : all_busy()) {
    const auto engine = played::engine_of(busy.channel());
    const auto ending = ending_of([&] { busy.wait(*engine, Deadline(200ms)); });
    // And the second by which a call may pass its limit.
    expect_end(ending, ErrorKind::timeout, busy, 0.2 + kSoon);
  }
});

const Test kSignal("a busy peer does not delay a signal", [] {
  for (const Busy& busy : all_busy()) {
    const auto engine =
        played::engine_of(busy.channel(), {.names = {}, .interrupted = [] { return true; }});
    const auto ending = ending_of([&] { busy.wait(*engine, Deadline(1h)); });
    expect_end(ending, ErrorKind::group_broken, busy, kSoon);
    expect(ending.says("rank 0 was interrupted"), ending.text());
  }
});

const Test kAbort("a busy peer does not delay an abort", [] {
  for (const Busy& busy : all_busy()) {
    std::promise<void> begun;
    // Asked once the call waits.
    const auto engine =
        played::engine_of(busy.channel(), {.names = {}, .interrupted = [&, told = false]() mutable {
                                             if (!std::exchange(told, true)) begun.set_value();
                                             return false;
                                           }});
    std::thread other([&] {
      begun.get_future().wait();
      engine->stop().request("enough");
    });
    const auto ending = ending_of([&] { busy.wait(*engine, Deadline(1h)); });
    other.join();
    expect_end(ending, ErrorKind::group_broken, busy, kSoon);
    expect(ending.says("enough"), ending.text());
  }
});

// Rank 0 waits for rank 2, which keeps it busy, and rank 1 for rank 0.
const Test kAccused("a rank that a peer keeps busy is not taken for dead", [] {
  for (const Busy& busy : all_busy())
    for (const std::string by : {"shm", "tcp"}) {
      // Under each sanitizer half of them.
      if (kSlowdown > 1 && ((by == "tcp") == (busy.how == "it floods")) == ranks::kRaces) continue;
      auto [a, b] = ranks::channel_pair(by, size_t{64} << 10);
      const std::vector<std::string> names{"rank 0", "rank 1", "rank 2"};
      std::vector<std::unique_ptr<Channel>> of_busy(3), of_waiting(3);
      of_busy[1] = std::move(a);
      of_busy[2] = busy.channel();
      of_waiting[0] = std::move(b);
      Engine middle(std::move(of_busy),
                    {.rank = 0, .names = names, .heartbeat = kHeartbeat, .interrupted = {}});
      Engine waits(std::move(of_waiting),
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
      middle.stop().request("enough");
      (void)works.get();
      expect(ending.is(ErrorKind::timeout), busy.how + ", " + by + ": " + ending.text());
    }
});

}  // namespace
