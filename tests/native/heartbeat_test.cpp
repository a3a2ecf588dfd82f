// Heartbeats: a waiting rank names a silent one but not a busy one, and the heartbeat thread and
// calls share the links without harm.
#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "harness.h"
#include "observe/heartbeat_thread.h"
#include "played_channels.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace ranks;
using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds kLimit = kSlowdown > 1 ? 2s : 500ms;
constexpr std::chrono::nanoseconds kLong = 3s;  // long enough for a rank without processor time
const std::vector<std::string> kTransports{"shm", "tcp"};

std::unique_ptr<engine::Engine> engine_of(int rank, std::unique_ptr<transport::Channel> channel) {
  return played::engine_of(std::move(channel),
                           {.rank = rank, .names = {}, .heartbeat = kLimit, .interrupted = {}});
}

// Rank 0 waits for a message of 4 bytes from rank 1.
Ending receive(engine::Engine& engine, std::chrono::nanoseconds timeout) {
  std::array<std::byte, 4> into{};
  transport::Header signature{.operation = static_cast<uint8_t>(Operation::send),
                              .count = into.size()};
  return ending_of([&] { engine.messenger().receive(1, signature, into, Deadline(timeout)); });
}

const Test kSilent("a rank that is silent for the limit is named", [] {
  for (const std::string& by : kTransports) {
    auto [a, b] = channel_pair(by, size_t{64} << 10);
    const auto waits = engine_of(0, std::move(a));
    const Ending ending = receive(*waits, 20 * kLimit);
    ending.check(ErrorKind::peer_lost, {"rank 1 sent no heartbeat"});
    expect_equal(ending.error->fields().peer, 1, "the silent rank");
  }
});

const Test kPulses("a rank with heartbeats is not named, and a call's limit still holds", [] {
  for (const std::string& by : kTransports) {
    auto [a, b] = channel_pair(by, size_t{64} << 10);
    const auto waits = engine_of(0, std::move(a));
    const auto busy = engine_of(1, std::move(b));
    observe::HeartbeatThread pulse;
    pulse.start(busy->heartbeat_interval(), [&] { return busy->heartbeat(); });
    const Ending ending = receive(*waits, 2 * kLimit);
    pulse.join();
    ending.check(ErrorKind::timeout);
  }
});

// A call that ends before its rank could wait for a peer.
class Short final : public engine::Task {
 public:
  explicit Short(std::function<void()> body) : body_(std::move(body)) {}
  bool advance() override {
    body_();
    return done_ = true;
  }
  bool done() const override { return done_; }
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override { return collectives::kNoRank; }

 private:
  std::function<void()> body_;
  bool done_ = false;
};

// Otherwise a rank that makes only short calls would send no heartbeats.
const Test kDue("a heartbeat that is due during a call is sent at its end", [] {
  for (const std::string& by : kTransports) {
    auto [a, b] = channel_pair(by, size_t{64} << 10);
    const auto idle = engine_of(0, std::move(a));
    const auto busy = engine_of(1, std::move(b));
    Short call([&] { std::thread([&] { busy->heartbeat(); }).join(); });
    const transport::Header header = busy->next_header({});
    busy->run(call, header, Deadline(kLong));
    expect(busy->traffic().bytes_written > 0, "nothing was sent");
    const auto limit = Deadline(kLong);
    const auto received = [&] {
      idle->heartbeat();
      return idle->status().peers[1].bytes_received;
    };
    while (received() == 0 && !limit.expired()) {
    }
    expect(received() > 0, "nothing was received");
  }
});

// Rank 0's value, on all ranks.
bool goes_on(group::Group& group, bool more) {
  uint8_t word = more;
  group.run({.operation = Operation::broadcast, .output = &word, .count = 1});
  return word != 0;
}

const Test kBoth("calls and heartbeats share the links", [] {
  for (const std::string& by : kTransports) {
    World world{.size = 3, .transport = by, .heartbeat = kLong};
    run_groups(world, [](group::Group& group) {
      const auto end = Clock::now() + kLong;  // five heartbeats from each rank to each
      for (int i = 0; goes_on(group, Clock::now() < end); ++i) {
        Array array(Dtype::float32, i % 2 == 0 ? 10 : 300'000);
        array.fill([](size_t) { return 1; });
        const group::Call call = sum_in_place(array);
        i % 3 == 0 ? group.start(call)->wait() : group.run(call);
      }
    });
  }
});

// Its root makes no other call before.
const Test kThrough("waiting for a root that already finished the call ends with an error", [] {
  for (const std::string& by : kTransports)
    for (const Algorithm algorithm : {Algorithm::automatic, Algorithm::direct}) {
      std::promise<void> heard;
      std::shared_future<void> after = heard.get_future();
      World world{.size = 3, .transport = by, .heartbeat = kLimit};
      run_groups(world, [&](group::Group& group) {
        std::array<float, 3> values{};
        const bool odd = group.rank() == 2;
        const group::Call scatter{.operation = Operation::scatter,
                                  .dtype = Dtype::float32,
                                  .input = values.data(),
                                  .output = values.data(),
                                  .count = 1,
                                  .peer = odd ? 1 : 0,
                                  .algorithm = algorithm};
        const Ending ending = ending_of([&] {
          group.run(scatter);
          after.wait();
          group.run({.operation = Operation::barrier});
        });
        if (odd) heard.set_value();
        ending.check(ErrorKind::mismatch, {"disagree"});
        group.run({.operation = Operation::barrier});
      });
    }
});

const Test kEnds("a heartbeat thread ends by itself, by join, and twice", [] {
  std::atomic<int> beats{0};
  observe::HeartbeatThread ends, joined;
  ends.start(1ms, [&] { return ++beats < 3; });
  joined.start(1h, [] { return true; });
  joined.join();
  joined.join();
  while (beats < 3) std::this_thread::yield();
  ends.join();
  expect_equal(beats.load(), 3, "beats");
});

}  // namespace
