// A rank that dies during a call, after any number of bytes: the others either have all data of the
// call, or an error that names the rank. Engines over channels that are disconnected on purpose.
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/choose.h"
#include "engine/engine.h"
#include "harness.h"
#include "kernels/kernels.h"
#include "mortal.h"
#include "os/shared_memory.h"
#include "played_channels.h"
#include "ranks.h"
#include "transport/ring_channel.h"

namespace {

using namespace pycomm;
using namespace pycomm::engine;
using namespace pycomm::os;
using namespace pycomm::transport;
using namespace played;
using namespace ranks;
using namespace std::chrono_literals;

struct Scene {
  Operation operation;
  Algorithm algorithm;
  int size;
  size_t count;
  int mortal;
  size_t lifetime;  // bytes that the mortal rank sends
  std::string text() const {
    return std::string(name_of(operation)) + " " + std::string(name_of(algorithm)) + ", rank " +
           std::to_string(mortal) + " of " + std::to_string(size) + " dies after " +
           std::to_string(lifetime) + " bytes: ";
  }
};

Header signature_of(const Scene& scene) {
  Header signature;
  signature.operation = static_cast<uint8_t>(scene.operation);
  signature.count = scene.count;
  signature.algorithm = static_cast<uint8_t>(scene.algorithm);
  signature.dtype = static_cast<uint8_t>(Dtype::float32);
  return signature;
}

// One call of an engine over float32; all_reduce or broadcast from rank 0.
void run_call(Engine& engine, const Scene& scene, Array& array,
              const Deadline& deadline = Deadline(20s)) {
  const Schedule schedule = make_schedule(
      collectives::make_plan(scene.algorithm, scene.operation,
                             {.rank = engine.rank(), .size = scene.size, .count = scene.count}),
      engine.rank());
  Job job{.schedule = &schedule};
  job.header = engine.next_header(signature_of(scene));
  job.input = job.output = array.data();
  job.element_bytes = 4;
  job.reducer = &kernels::reducer(Dtype::float32, ReduceOp::sum);
  job.size = scene.size;
  engine::PlanTask task = engine.plan_task(job);
  engine.run(task, job.header, deadline);
}

void expect_known(const Error& error, const Scene& scene) {
  const std::string who = "rank " + std::to_string(scene.mortal);
  const std::string text = error.what();
  expect(error.kind() == ErrorKind::peer_lost, scene.text() + text);
  expect(error.fields().peer == scene.mortal && text.find(who) != std::string::npos,
         scene.text() + text);
}

// A survivor's call gives the right result or an error that names the dead rank; the next call
// fails.
void survive(Engine& engine, const Scene& scene) {
  Array array(Dtype::float32, scene.count), want(Dtype::float32, scene.count);
  array.fill([&](size_t i) { return element(engine.rank(), i); });
  want.fill([&](size_t i) {
    int sum = element(0, i);
    if (scene.operation == Operation::all_reduce)
      for (int rank = 1; rank < scene.size; ++rank) sum += element(rank, i);
    return sum;
  });
  try {
    run_call(engine, scene, array);
  } catch (const Error& error) {
    expect_known(error, scene);
    expect_throws<GroupBroken>([&] { run_call(engine, scene, array); });
    return;
  }
  expect(array == want, scene.text() + "a call succeeded with wrong numbers");
}

void play(const std::string& transport, const Scene& scene) {
  Channels all(scene.size, transport, scene.mortal, scene.lifetime);
  std::mutex mutex;
  std::vector<std::unique_ptr<Engine>>
      engines;  // kept: a rank that succeeds must not leave before the others
  run(scene.size, [&](int rank) {
    Engine* engine = nullptr;
    {
      const std::lock_guard lock(mutex);
      engines.push_back(all.engine(rank));
      engine = engines.back().get();
    }
    if (rank != scene.mortal) return survive(*engine, scene);
    Array array(Dtype::float32, scene.count);
    array.fill([&](size_t i) { return element(rank, i); });
    try {
      run_call(*engine, scene, array);
    } catch (const Died&) {
      return;
    }
    const std::lock_guard lock(mutex);
    all.life.end();  // nothing more to send: it dies after its call
  });
}

const ByTransport kEverywhere(
    "all ranks detect a death after any number of bytes", [](const std::string& by) {
      constexpr size_t kCount = 60'000;  // 240 KB: more than a ring holds
      for (const Operation operation : {Operation::all_reduce, Operation::broadcast})
        for (const Algorithm algorithm : collectives::algorithms_for(operation))
          for (const int size : {3, 4}) {
            int mortal = 0;
            for (const size_t lifetime :
                 {1, 31, 32, 33, 34, 1'000, 65'538, 100'000, 161'001, 230'003})
              play(by, {operation, algorithm, size, kCount, mortal++ % size, lifetime});
          }
    });

// Rank 0 only sends, to a rank that left or died in one of several ways.
void send_on(const std::string& by, void (*go)(Engine&, Life&), std::string_view why) {
  const Scene scene{Operation::broadcast, Algorithm::direct, 2, 60'000, 1, SIZE_MAX};
  Channels all(scene.size, by, scene.mortal, scene.lifetime);
  const auto sender = all.engine(0), gone = all.engine(1);
  Array array(Dtype::float32, scene.count);
  go(*gone, all.life);
  constexpr int kMostCalls = 1'000;
  for (int call = 0; call < kMostCalls; ++call) {
    try {
      run_call(*sender, scene, array);
    } catch (const Error& error) {
      expect(error.kind() == ErrorKind::peer_lost && error.fields().peer == 1 &&
                 std::string(error.what()).find(why) != std::string::npos,
             error.what());
      return;
    }
  }
  expect(false, "a thousand calls sent to a rank that left");
}

const ByTransport kSenders(
    "a rank that only sends detects that its receiver left", [](const std::string& by) {
      send_on(by, [](Engine&, Life& life) { life.end(); }, "the connection closed unexpectedly");
      send_on(by, [](Engine& gone, Life&) { gone.leave(); }, "it closed the group");
      send_on(
          by, [](Engine& gone, Life&) { gone.fail(PeerLost("no more", {.peer = 1})); },
          "no more (as rank 1 reports)");
    });

// No rank reads until both ends exist: the goodbye message waits behind a full connection.
const ByTransport kHeardLate(
    "a rank that aborts is not taken for dead by a rank that has long read nothing",
    [](const std::string& by) {
      const Scene scene{Operation::broadcast, Algorithm::direct, 3, 4'000'000, 2, SIZE_MAX};
      Channels all(scene.size, by, scene.mortal, scene.lifetime);
      const auto sender = all.engine(0), busy = all.engine(1), dead = all.engine(2);
      all.life.end();
      Array array(Dtype::float32, scene.count);
      ending_of([&] {
        for (int call = 0; call < 100; ++call) run_call(*sender, scene, array);
      }).check(ErrorKind::peer_lost, {"rank 2 died"});
      ending_of([&] {
        run_call(*busy, scene, array);
      }).check(ErrorKind::peer_lost, {"rank 2 died"}, 2);
      expect(busy->status().lost == std::vector<int>{2}, "a live rank is counted as lost");
    });

// Bytes that are no frame, behind a frame that is not received yet; then perhaps a close.
void send_garbage(Channel& channel, Header before, bool hangs_up) {
  const std::vector<std::byte> noise(64, std::byte{'G'});
  const auto head = std::as_bytes(std::span(&before, 1));
  expect_equal(channel.send(head, noise), head.size() + noise.size(), "bytes that fit");
  channel.wake_peer();
  if (hangs_up) channel.close({});
}

// Until it is closed, or has more than `bytes` to read.
void wait_for_end(Channel& channel, size_t bytes = size_t{32} << 10) {
  const Deadline deadline(20s);
  while (!channel.is_closed() && channel.peek(bytes + 1).size() <= bytes) {
    expect(!deadline.expired(), "the end is not visible");
    pollfd polled = channel.arm({true, false});
    ::poll(&polled, 1, 10);
    channel.disarm(polled.revents);
  }
}

const ByTransport kGarbage(
    "the sender of an invalid frame is named, wherever it is found", [](const std::string& by) {
      for (const bool hangs_up : {true, false}) {
        Ends ends = channel_pair(by, size_t{64} << 10);
        // Of a later call or a later disagreement, which ends no wait.
        Header header{.kind = hangs_up ? FrameKind::data : FrameKind::mismatch};
        header.epoch = hangs_up ? 0 : 7;
        header.sequence = 7;
        send_garbage(*ends.b, header, hangs_up);
        if (hangs_up) wait_for_end(*ends.a);
        const auto engine = engine_of(std::move(ends.a));
        const auto ending = ending_of([&] {
          if (hangs_up) {
            const std::vector<std::byte> message(1000);
            Header signature;
            signature.count = message.size();
            return engine->messenger().send(1, signature, message, Deadline(20s));
          }
          const Scene scene{Operation::all_reduce, Algorithm::direct, 2, 1, 1, 0};
          Array array(Dtype::float32, 1);
          run_call(*engine, scene, array, Deadline(200ms));
        });
        expect(ending.is(hangs_up ? ErrorKind::peer_lost : ErrorKind::timeout), ending.text());
        if (hangs_up) expect(ending.says("protocol error from rank 1"), ending.text());
        expect(!ending.says("bug in pycomm"), ending.text());
      }
    });

// Rank 1 sent data of a call, received the notice that a third rank made another call, and left.
const ByTransport kMismatchThenLeft(
    "a mismatch is reported although the rank that reports it left", [](const std::string& by) {
      const Scene scene{Operation::all_reduce, Algorithm::direct, 2, 1, 1, 0};
      Ends ends = channel_pair(by, size_t{64} << 10);
      const auto send = [&](Header header, std::string_view payload) {
        header.bytes = static_cast<uint32_t>(payload.size());
        const auto head = std::as_bytes(std::span(&header, 1));
        const auto body = std::as_bytes(std::span(payload));
        expect_equal(ends.b->send(head, body), head.size() + body.size(), "bytes that fit");
      };
      send(signature_of(scene), "1234");
      send({.kind = FrameKind::mismatch}, "rank 2 made another call");
      const std::string clean =
          std::string(1, Goodbye::kLeftCleanly) + "\xff\xff\xff\xff";  // blames none
      send({.kind = FrameKind::goodbye, .epoch = 1}, clean + "it closed the group");
      ends.b->wake_peer();
      ends.b->close({});
      wait_for_end(*ends.a);
      const auto engine = engine_of(std::move(ends.a));
      Array array(Dtype::float32, 1);
      ending_of([&] {
        run_call(*engine, scene, array);
      }).check(ErrorKind::mismatch, {"rank 2 made another"});
      ending_of([&] {
        run_call(*engine, scene, array);
      }).check(ErrorKind::peer_lost, {"it closed the group"});
    });

// check_for_failures() between calls: the next call reports ranks that are not awaited.
const ByTransport kHeeded(
    "a wait outside a call reports the death of the awaited rank only", [](const std::string& by) {
      Channels all(3, by, 2, SIZE_MAX);
      const auto waiting = all.engine(0), other = all.engine(1), dead = all.engine(2);
      waiting->check_for_failures(0s, {0, 1, 2});
      all.life.end();
      const auto check = [&](const std::vector<int>& awaited) {
        return ending_of([&] {
          for (const Deadline deadline(20s); !deadline.expired() && awaited.back() == 2;)
            waiting->check_for_failures(0s, awaited);
          waiting->check_for_failures(0s, awaited);
        });
      };
      expect(!check({0, 1}).error, "the death of a rank that is not awaited ended the wait");
      const auto ending = check({0, 2});
      ending.check(ErrorKind::peer_lost, {"rank 2 died"}, 2);
    });

// A peer whose close is visible only after a few checks.
class Late final : public PlayedChannel {
 public:
  bool is_closed() const override { return looks_ > 5; }
  pollfd arm(Want) override {
    ++looks_;
    return {-1, 0, 0};
  }

 private:
  int looks_ = 0;
};

const Test kHeededLate("a wait outside a call reports a death within its limit", [] {
  for (const auto limit : {0s, 60s}) {
    const auto engine = engine_of(std::make_unique<Late>());
    const auto ending = ending_of([&] { engine->check_for_failures(limit, {0, 1}); });
    expect(ending.is(ErrorKind::peer_lost) == (limit > 0s), ending.text());
    expect(ending.seconds < 30, "it waited for its limit");
  }
});

// Rank 0 made a call that rank 1 makes later, if it can, and then ends in one of several ways.
const ByTransport kHeededBehind(
    "a wait outside a call reports an end behind a frame of a later call",
    [](const std::string& by) {
      struct End {
        void (*go)(Engine&, Life&);
        std::string_view says;  // empty: its data is still needed
      };
      for (const End& end : std::initializer_list<End>{
               {[](Engine&, Life& life) { life.end(); }, "rank 0 died"},
               {[](Engine& gone, Life&) { gone.fail(GroupBroken("enough")); }, "enough (as rank 0"},
               {[](Engine& gone, Life&) { gone.leave(); }, ""}}) {
        const Scene scene{Operation::broadcast, Algorithm::direct, 2, 100, 0, SIZE_MAX};
        Channels all(scene.size, by, scene.mortal, scene.lifetime);
        Channel& line = *all.channels[1][0];
        const auto gone = all.engine(0), waiting = all.engine(1);
        Array sent(Dtype::float32, scene.count), got(Dtype::float32, scene.count);
        sent.fill([](size_t i) { return element(0, i); });
        run_call(*gone, scene, sent);
        waiting->check_for_failures(0s, {0, 1});
        end.go(*gone, all.life);
        // Rings show it at once. A goodbye is behind the frame.
        if (by == "tcp") wait_for_end(line, sizeof(Header) + 4 * scene.count);
        waiting->check_for_failures(0s, {1});  // not awaited: no error
        const auto ending = ending_of([&] { waiting->check_for_failures(0s, {0, 1}); });
        if (!end.says.empty()) {
          expect(ending.error && ending.says(std::string(end.says)), ending.text());
          continue;
        }
        expect(!ending.error, ending.text());
        run_call(*waiting, scene, got);
        expect(got == sent, "the call was spoilt");
      }
    });

// A ring whose writer says that it has written more than fits: before a frame, or inside one.
const Test kSpoiltRing("a rank that corrupts its shared ring is named", [] {
  constexpr size_t kRing = size_t{64} << 10;
  for (const bool inside : {false, true}) {
    const auto ring = [&](const Fd& memory) {
      return std::make_shared<RingMemory>(memory.get(), kRing);
    };
    const Fd in = make_shared_memory(RingMemory::file_bytes(kRing));
    const Fd out = make_shared_memory(RingMemory::file_bytes(kRing));
    int wake_ups[2];
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, wake_ups) == 0,
           "a pair of sockets");
    RingChannel peer("shm", ring(out), ring(in), Fd(wake_ups[1]));
    const Header header{.kind = FrameKind::data,
                        .dtype = static_cast<uint8_t>(Dtype::float32),
                        .bytes = 64,
                        .count = 16};
    if (inside) (void)peer.send(std::as_bytes(std::span(&header, 1)), {});
    const auto memory = ring(in);
    reinterpret_cast<RingHead<>*>(memory->head())->written += kRing + 1;
    const auto engine =
        engine_of(std::make_unique<RingChannel>("shm", ring(in), ring(out), Fd(wake_ups[0])));
    ending_of([&] {
      const Scene scene{Operation::all_reduce, Algorithm::direct, 2, 16, 1, 0};
      Array array(Dtype::float32, 16);
      run_call(*engine, scene, array);
    }).check(ErrorKind::peer_lost, {"protocol error from rank 1", ": its ring"});
  }
});

const ByTransport kPartings("a rank that left cleanly counts as lost, even if no rank checked",
                            [](const std::string& by) {
                              Channels all(3, by, 1, SIZE_MAX);
                              Channel& unread = *all.channels[0][2];
                              const auto left = all.engine(0), gone = all.engine(2);
                              gone->leave();
                              const Deadline deadline(20s);
                              while (unread.peek(1).empty() && !deadline.expired()) {
                                pollfd polled = unread.arm({true, false});
                                ::poll(&polled, 1, 10);
                                unread.disarm(0);  // no notice of the end
                              }
                              left->fail(PeerLost("no more", {.peer = 1}));
                              expect(left->status().lost == std::vector<int>{1, 2},
                                     "the call waits for a rank that left");
                            });

}  // namespace
