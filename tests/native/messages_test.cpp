// Messages between two ranks over every transport: order, mismatches, and receives that wait while
// other calls run. Failures are in engine_test.cpp.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "core/message_progress.h"
#include "engine/engine.h"
#include "harness.h"
#include "numbered.h"
#include "played_channels.h"
#include "ranks.h"
#include "transport/frame.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;

const ByGroups kMessages("messages are kept by tag, in order, until they are received", 3,
                         [](Group& group) {
                           if (group.rank() == 0) {
                             for (int i = 0; i < 4; ++i) send(group, 1000, i, 1, 5);
                             send(group, 0, 0, 1, 6);
                             send(group, 300'000, 9, 1, 7);
                           }
                           group.run({.operation = Operation::barrier});
                           if (group.rank() == 1) {
                             receive(group, 300'000, 9, 0, 7);
                             for (int i = 0; i < 4; ++i) receive(group, 1000, i, 0, 5);
                             receive(group, 0, 0, 0, 6);
                           }
                           group.run({.operation = Operation::barrier});
                           // All ranks send to all before any receives, far more than any buffer
                           // holds.
                           constexpr size_t kMany = 500'000;
                           for (int step = 1; step < 3; ++step)
                             send(group, kMany, group.rank() * 3 + step, (group.rank() + step) % 3,
                                  1);
                           for (int step = 1; step < 3; ++step) {
                             const int from = (group.rank() + 3 - step) % 3;
                             receive(group, kMany, from * 3 + step, from, 1);
                           }
                         });

// How much of each message may be sent, and what arrived.
class Steps final : public MessageProgress {
 public:
  std::array<std::atomic<size_t>, 2> sendable{};
  std::function<void(size_t index, size_t bytes)> on_received{};
  size_t ready(size_t index) const override { return sendable.at(index); }
  void received(size_t index, size_t bytes) override { on_received(index, bytes); }
};

const ByTransport kSteps(
    "a message is sent as its data becomes ready, and arrives in parts", [](const std::string& by) {
      constexpr size_t kCount = 300'000, kParts = 8, kPart = kCount / kParts * sizeof(int64_t);
      Array wanted = numbers(kCount, 9);
      Array sent(Dtype::int64, kCount);
      Steps sends;
      // The next part is written when the parts before it have arrived, as far as they fill frames.
      const auto allow_next = [&](size_t arrived) {
        const size_t ready = sends.sendable[0];
        if (arrived < ready / transport::kSegmentBytes * transport::kSegmentBytes) return;
        const size_t end = std::min(ready + kPart, sent.bytes());
        std::memcpy(sent.data() + ready, wanted.data() + ready, end - ready);
        sends.sendable[0] = end;
        sends.wake();
      };
      allow_next(0);
      run_groups(2, by, [&](Group& group) {
        if (group.rank() == 0) {
          group.exchange(std::array{message(Operation::send, sent, 1)}, &sends);
          return;
        }
        Array array(Dtype::int64, kCount);
        Steps receives;
        size_t last = 0;
        receives.on_received = [&](size_t index, size_t bytes) {
          expect(index == 0 && bytes >= last, "bytes that arrived");
          last = bytes;
          allow_next(bytes);
        };
        group.exchange(std::array{message(Operation::recv, array, 0)}, &receives);
        expect_equal(last, array.bytes(), "bytes that arrived");
        expect(array == wanted, "the message is wrong");
      });
    });

const ByTransport kNotReady("a message that is not ready delays no other",
                            [](const std::string& by) {
                              Steps sends;
                              sends.sendable[1] = 8000;
                              run_groups(3, by, [&](Group& group) {
                                if (group.rank() > 0) receive(group, 1000, group.rank(), 0, 0);
                                if (group.rank() == 2) {
                                  sends.sendable[0] = 8000;
                                  sends.wake();
                                }
                                if (group.rank() > 0) return;
                                Array first = numbers(1000, 1), second = numbers(1000, 2);
                                group.exchange(std::array{message(Operation::send, first, 1),
                                                          message(Operation::send, second, 2)},
                                               &sends);
                              });
                            });

// Lets each message be sent when the one before it has arrived and the sender sleeps.
class InTurn final : public MessageProgress {
 public:
  static constexpr size_t kMessages = 400;
  explicit InTurn(InTurn& of_sender) : of_sender_(of_sender) {}
  void set_thread() { thread_ = gettid(); }
  size_t ready(size_t index) const override { return index <= turn_ ? sizeof(int64_t) : 0; }
  void received(size_t index, size_t bytes) override {
    const bool is_last = index + 1 == kMessages;  // its sender does not sleep
    if (bytes < sizeof(int64_t) || index < of_sender_.turn_ || is_last) return;
    while (!of_sender_.sleeps()) std::this_thread::yield();
    of_sender_.turn_ = index + 1;
    of_sender_.wake();
  }

 private:
  bool sleeps() const {
    std::ifstream file("/proc/self/task/" + std::to_string(thread_) + "/stat");
    std::string id, name, state;
    return file >> id >> name >> state && state == "S";
  }
  InTurn& of_sender_;
  std::atomic<size_t> turn_ = 0;
  std::atomic<pid_t> thread_ = 0;
};

// The engines do not spin. Without the wake each message would wait for the next poll, and all for
// longer than the timeout.
const Test kWoken("a message that becomes ready wakes its sender", [] {
  auto [a, b] = channel_pair("tcp", size_t{64} << 10);
  std::array channels{std::move(a), std::move(b)};
  InTurn sends(sends), receives(sends);
  constexpr size_t kMessages = InTurn::kMessages;
  run(2, [&](int rank) {
    const auto engine = played::engine_of(std::move(channels.at(static_cast<size_t>(rank))),
                                          {.rank = rank, .names = {}, .interrupted = {}});
    if (rank == 0) sends.set_thread();
    Array array = rank == 0 ? numbers(kMessages, 3) : Array(Dtype::int64, kMessages);
    std::vector<engine::MessageRequest> messages;
    for (size_t i = 0; i < kMessages; ++i)
      messages.push_back({.peer = 1 - rank,
                          .signature = {.operation = static_cast<uint8_t>(Operation::send),
                                        .dtype = static_cast<uint8_t>(Dtype::int64),
                                        .count = 1},
                          .sends = rank == 0,
                          .out = {array.at(i), sizeof(int64_t)},
                          .into = {array.at(i), sizeof(int64_t)}});
    engine->messenger().exchange(messages, rank == 0 ? &sends : &receives,
                                 Deadline(std::chrono::seconds(30)));
    expect(array == numbers(kMessages, 3), "the messages are wrong");
    engine->leave();
  });
});

const ByGroups kMismatched("a message of another kind is dropped; the group continues", 2,
                           [](Group& group) {
                             for (int i = 0; i < 3; ++i) {
                               if (group.rank() == 0) {
                                 send(group, 4, 1, 1, 0);
                                 send(group, 50'000, 2, 1, 0);
                               } else {
                                 Array array(Dtype::int64, 3);
                                 const Array before = array;
                                 ending_of([&] {
                                   group.run(message(Operation::recv, array, 0));
                                 }).check(ErrorKind::mismatch, {"count 4", "count 3"});
                                 expect(array == before, "a wrong message was written");
                                 const auto work =
                                     group.start(message(Operation::recv, array, 0), {});
                                 expect_throws<Mismatch>([&] { work->wait(); });
                                 expect(work->done() && work->error() && array == before,
                                        "the error of the work");
                               }
                               run_case(group, {Operation::all_reduce, Algorithm::ring,
                                                Dtype::float32, ReduceOp::sum, 500, 0, true, i});
                             }
                           });

// A receive that was started, and its array.
struct Started {
  Started(Group& group, size_t count, int peer, uint32_t tag)
      : array(Dtype::int64, count),
        work(group.start(message(Operation::recv, array, peer, tag), {})) {}
  void expect_message(int seed) {
    work->wait();
    expect(array == numbers(count(), seed), "message " + std::to_string(seed) + " is wrong");
  }
  size_t count() const { return array.bytes() / sizeof(int64_t); }
  Array array;
  std::shared_ptr<Work> work;
};

const ByGroups kPendingReceives("other calls pass receives that wait", 3, [](Group& group) {
  const int rank = group.rank(), next = (rank + 1) % 3, last = (rank + 2) % 3;
  for (const size_t count : {0, 10, 100'000, 600'000}) {
    // All ranks receive before any sends. The second receive is complete first.
    Started from_last(group, count, last, 1), from_next(group, count, next, 1);
    run_case(group, {Operation::all_reduce, Algorithm::ring, Dtype::float32, ReduceOp::sum, 70'000,
                     0, true, 1});
    Array sent = numbers(count, rank);
    const auto send_next = group.start(message(Operation::send, sent, next, 1), {});
    from_last.expect_message(last);
    expect(!from_next.work->done(), "received before it was sent");
    group.run({.operation = Operation::barrier});
    send(group, count, rank, last, 1);
    from_next.expect_message(next);
    send_next->wait();
  }
});

const ByGroups kSeveralReceives("a receive completes while an earlier one waits", 3,
                                [](Group& group) {
                                  if (group.rank() == 2) return send(group, 10, 2, 0, 0);
                                  if (group.rank() == 1) {
                                    receive(group, 10, 0, 0, 0);
                                    return send(group, 10, 1, 0, 0);
                                  }
                                  Started first(group, 10, 1, 0);
                                  (void)numbers(1'000'000, 0);  // the worker begins to wait
                                  Started second(group, 10, 2, 0);
                                  second.expect_message(2);
                                  send(group, 10, 0, 1, 0);
                                  first.expect_message(1);
                                });

const ByGroups kOldest("a receive from any rank takes the message that arrived first", 3,
                       [](Group& group) {
                         const int rank = group.rank();
                         if (rank != 0) {
                           if (rank == 1) receive(group, 1, 0, 0, 7);
                           send(group, 10, rank, 0, 5);
                           return send(group, 1, rank, 0, 6);
                         }
                         receive(group, 1, 2, 2, 6);  // behind the other message of that rank
                         send(group, 1, 0, 1, 7);
                         receive(group, 1, 1, 1, 6);
                         for (const int from : {2, 1}) receive(group, 10, from, kAnySource, 5);
                       });

const ByTransport kReceiveOrder(
    "receives of a tag get the messages in the order of their calls", [](const std::string& by) {
      for (const int count : {4, 30})  // with 4, the first receive of a tag is deferred
        for (const size_t n : {10, 20'000})
          run_groups(2, by, [=](Group& group) {
            const auto tag = [](int i) { return static_cast<uint32_t>(i % 3); };
            if (group.rank() == 0) {
              group.run({.operation = Operation::barrier});
              for (int i = 0; i < count; ++i) send(group, n, i, 1, tag(i));
              return;
            }
            std::deque<Started> started;
            for (int i = 0; i < count - 3; ++i)
              started.emplace_back(group, n, i % 2 == 0 ? 0 : kAnySource, tag(i));
            group.run({.operation = Operation::barrier});
            for (int i = count - 3; i < count; ++i)  // on this thread, behind those
              receive(group, n, i, 0, tag(i));
            for (int i = count - 4; i >= 0; --i) started[static_cast<size_t>(i)].expect_message(i);
          });
    });

const ByGroups kMismatchedAmongReceives(
    "of receives that wait, the one that does not match its message fails", 2, [](Group& group) {
      if (group.rank() == 0) {
        send(group, 7, 1, 1, 1);
        receive(group, 1, 3, 1, 0);
        return send(group, 5, 2, 1, 0);
      }
      Started first(group, 5, 0, 0), second(group, 5, 0, 1);
      ending_of([&] { second.work->wait(); }).check(ErrorKind::mismatch, {"count 7"});
      send(group, 1, 3, 0, 0);
      first.expect_message(2);
    });

const ByTransport kEndedReceives(
    "close and abort end the receives that wait", [](const std::string& by) {
      for (const bool aborts : {false, true})
        for (const int count : {1, 2})  // one alone is deferred
          run_groups(2, by, [&](Group& group) {
            std::deque<Started> started;
            for (int i = 0; i < count; ++i)
              started.emplace_back(group, 5, 1 - group.rank(), static_cast<uint32_t>(i));
            group.run({.operation = Operation::barrier});
            aborts ? group.abort("for this test") : group.close();
            for (Started& one : started) {
              const auto ending = ending_of([&] { one.work->wait(); });
              expect(ending.is(ErrorKind::group_broken) || ending.is(ErrorKind::peer_lost),
                     ending.text());
            }
          });
    });

// A small receive with nothing else under way runs on the thread that waits for it.
const ByGroups kDeferredReceive(
    "a deferred receive completes for every use of its work", 2, [](Group& group) {
      const Case sum{
          Operation::all_reduce, Algorithm::ring, Dtype::float32, ReduceOp::sum, 900, 0, true, 1};
      for (int round = 0; round < 20; ++round) {
        if (group.rank() == 0) {
          send(group, 10, round, 1, 0);  // for a wait without a limit
          send(group, 10, round, 1, 0);  // with one
          send(group, 10, round, 1, 0);  // for done()
          run_case(group, sum);
          send(group, 10, round, 1, 0);  // for another thread, which this rank's call suspends
          run_case(group, sum);
          continue;
        }
        Started(group, 10, 0, 0).expect_message(round);
        Started with_limit(group, 10, 0, 0);
        with_limit.work->wait(std::chrono::minutes(1));
        with_limit.expect_message(round);
        Started polled(group, 10, 0, 0);
        while (!polled.work->done()) std::this_thread::yield();
        polled.expect_message(round);
        Started deferred(group, 10, 0, 0);
        std::thread waiter([&] { deferred.work->wait(); });
        run_case(group, sum);
        waiter.join();
        deferred.expect_message(round);
        run_case(group, sum);
      }
    });

const ByTransport kUnusedReceive(
    "a receive whose work is not used begins with a heartbeat", [](const std::string& by) {
      if (by == "local") return;  // ranks of one process send no heartbeats
      World world{.size = 2, .transport = by, .heartbeat = std::chrono::seconds(1)};
      std::promise<void> promise;
      const std::shared_future<void> received = promise.get_future().share();
      run_groups(world, [&](Group& group) {
        if (group.rank() == 0) {
          send(group, 10, 1, 1, 0);
          return received.wait();
        }
        Array array(Dtype::int64, 10);
        const auto work = group.start(message(Operation::recv, array, 0),
                                      [&](const std::exception_ptr&) { promise.set_value(); });
        received.wait();
        expect(!work->error() && array == numbers(10, 1), "the message");
      });
    });

const ByTransport kSmallSends(
    "small sends do not wait for their receivers and stay in order", [](const std::string& by) {
      std::promise<void> started;
      run_groups(2, by, [&](Group& group) {
        constexpr int kCount = 2000;  // 32 MB, more than any buffer holds
        constexpr size_t kElements = 2000;
        group.run({.operation = Operation::barrier});
        if (group.rank() == 1) {
          started.get_future().wait();
          receive(group, 1, -1, 0, 1);
          for (int i = 0; i < kCount; ++i) receive(group, kElements, i, 0, 0);
          return;
        }
        Array first = numbers(1, -1);
        const auto work = group.start(message(Operation::send, first, 1, 1), {});
        expect(by == "tcp" || work->done(), "a message that fits the ring waited for the worker");
        std::deque<Array> arrays;
        std::vector<std::shared_ptr<Work>> sends;
        for (int i = 0; i < kCount; ++i) {
          arrays.push_back(numbers(kElements, i));
          sends.push_back(group.start(message(Operation::send, arrays.back(), 1), {}));
        }
        started.set_value();
        for (const auto& one : sends) one->wait();
      });
    });

const ByTransport kTwoThreads("two threads start small messages", [](const std::string& by) {
  run_groups(2, by, [&](Group& group) {
    constexpr int kCount = 2000;
    if (group.rank() == 1) {
      for (int i = 0; i < 2 * kCount; ++i) receive(group, 10, i, 0, i / kCount);
      return;
    }
    const auto start_all = [&](int tag) {
      for (int i = tag * kCount; i < (tag + 1) * kCount; ++i) {
        Array array = numbers(10, i);
        group.start(message(Operation::send, array, 1, tag), {})->wait();
      }
    };
    auto other = std::async(std::launch::async, start_all, 1);
    start_all(0);
    other.get();
  });
});

}  // namespace
