// Several threads on one group with thread_multiple, over every transport.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "harness.h"
#include "numbered.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;

void run_threads(World& world, const std::function<void(Group&)>& body) {
  world.thread_multiple = true;
  run_groups(world, body);
}

void run_threads(int size, const std::string& by, const std::function<void(Group&)>& body) {
  World world{.size = size, .transport = by};
  run_threads(world, body);
}

// An all_reduce of as many numbers, over links.
void sum(Group& group, size_t count) {
  Array array = numbers(count, 1);
  group.run({.operation = Operation::all_reduce,
             .dtype = Dtype::int64,
             .input = array.data(),
             .output = array.data(),
             .count = count,
             .algorithm = Algorithm::ring});
  Array expected(Dtype::int64, count);
  expected.fill([&](size_t i) { return group.size() * element(1, i); });
  expect(array == expected, "the sum");
}

// Lets the other ranks end, also after a failure.
struct AtEnd {
  std::promise<void>& over;
  ~AtEnd() { over.set_value(); }
};

// Waiting threads poll `interrupted`, so a thread is known to wait once it did.
class Waiting {
 public:
  bool ask() {
    const std::lock_guard lock(mutex_);
    seen_.insert(std::this_thread::get_id());
    changed_.notify_all();
    return false;
  }
  void await(std::thread::id thread) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return seen_.contains(thread); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::thread::id> seen_;
};

const ByTransport kTurns("turns are first come, first served", [](const std::string& by) {
  Waiting waiting;
  World world{.size = 2, .transport = by, .interrupted = [&] { return waiting.ask(); }};
  std::promise<void> queued;
  constexpr std::array<size_t, 5> kCounts{10, 20, 30, 40, 50};  // the calls, in their order
  run_threads(world, [&](Group& group) {
    if (group.rank() == 1) {
      queued.get_future().wait();
      for (const size_t count : kCounts) sum(group, count);
      return;
    }
    std::vector<std::thread> threads;
    std::vector<std::shared_ptr<Work>> works;
    std::vector<Array> arrays;
    arrays.reserve(kCounts.size());
    for (size_t i = 0; i < kCounts.size(); ++i) {
      if (i % 2 == 1) {
        Array& array = arrays.emplace_back(numbers(kCounts[i], 1));
        works.push_back(group.start({.operation = Operation::all_reduce,
                                     .dtype = Dtype::int64,
                                     .input = array.data(),
                                     .output = array.data(),
                                     .count = kCounts[i],
                                     .algorithm = Algorithm::ring},
                                    {}));
        continue;
      }
      threads.emplace_back([&, i] { sum(group, kCounts[i]); });
      waiting.await(threads.back().get_id());
    }
    queued.set_value();
    for (std::thread& thread : threads) thread.join();
    for (const auto& work : works) work->wait();
  });
});

const ByTransport kOneAtATime("calls of many threads run one at a time", [](const std::string& by) {
  run_threads(3, by, [&](Group& group) {
    run(4, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        if (thread % 2 == 0) {
          sum(group, 100);
          continue;
        }
        Array array = numbers(100, 1);
        group
            .start({.operation = Operation::all_reduce,
                    .dtype = Dtype::int64,
                    .input = array.data(),
                    .output = array.data(),
                    .count = 100,
                    .algorithm = Algorithm::ring},
                   {})
            ->wait();
      }
    });
  });
});

const ByTransport kMessages("messages of threads do not wait for each other",
                            [](const std::string& by) {
                              run_threads(2, by, [&](Group& group) {
                                const int peer = 1 - group.rank();
                                run(3, [&](int thread) {
                                  const auto tag = static_cast<uint32_t>(thread);
                                  for (int i = 0; i < 100; ++i) {
                                    // In the opposite order of tags on the two ranks.
                                    if (group.rank() == 0) send(group, 1000, i, peer, tag);
                                    receive(group, 1000, i, peer, tag);
                                    if (group.rank() == 1) send(group, 1000, i, peer, tag);
                                  }
                                });
                              });
                            });

// Each count: less than a frame, and more than a ring holds, so that the frames of the collective
// stop before the receiver reads them.
const ByTransport kBesides("a message passes a collective that waits for its receiver",
                           [](const std::string& by) {
                             Waiting waiting;
                             World world{.size = 2, .transport = by, .interrupted = [&] {
                                           return waiting.ask();
                                         }};
                             run_threads(world, [&](Group& group) {
                               for (const size_t count : {size_t{8}, size_t{2'000'000}}) {
                                 if (group.rank() == 1) {
                                   receive(group, count, 7, 0, 0);
                                   send(group, count, 8, 0, 1);
                                   sum(group, count);
                                   continue;
                                 }
                                 std::thread collective([&] { sum(group, count); });
                                 waiting.await(collective.get_id());
                                 send(group, count, 7, 1, 0);
                                 receive(group, count, 8, 1, 1);
                                 collective.join();
                               }
                             });
                           });

const ByTransport kYields("a message that drives the engine yields to a collective",
                          [](const std::string& by) {
                            Waiting waiting;
                            World world{.size = 2, .transport = by, .interrupted = [&] {
                                          return waiting.ask();
                                        }};
                            run_threads(world, [&](Group& group) {
                              for (int i = 0; i < 3; ++i) {
                                if (group.rank() == 1) {
                                  sum(group, 100'000);
                                  send(group, 100'000, i, 0, 3);
                                  sum(group, 10);
                                  continue;
                                }
                                std::thread receiver([&] { receive(group, 100'000, i, 1, 3); });
                                if (i == 0) waiting.await(receiver.get_id());
                                sum(group, 100'000);
                                sum(group, 10);
                                receiver.join();
                              }
                            });
                          });

const ByTransport kAsynchronous(
    "asynchronous messages pass an asynchronous collective", [](const std::string& by) {
      run_threads(2, by, [&](Group& group) {
        Array in = numbers(1000, 1), out = numbers(1000, 1), message_array = numbers(50'000, 4);
        const Call sum_call{.operation = Operation::all_reduce,
                            .dtype = Dtype::int64,
                            .input = in.data(),
                            .output = out.data(),
                            .count = 1000};
        if (group.rank() == 0) {
          const auto work = group.start(sum_call, {});
          group.start(message(Operation::send, message_array, 1, 2), {})->wait();
          work->wait();
          return;
        }
        Array received(Dtype::int64, 50'000);
        group.start(message(Operation::recv, received, 0, 2), {})->wait();
        expect(received == message_array, "the message");
        group.run(sum_call);
      });
    });

const ByTransport kLate("a thread whose turn does not come", [](const std::string& by) {
  std::promise<void> over;
  run_threads(2, by, [&](Group& group) {
    if (group.rank() == 1) return over.get_future().wait();
    const AtEnd at_end{over};
    Array array = numbers(10, 1);
    Call call{.operation = Operation::all_reduce,
              .dtype = Dtype::int64,
              .input = array.data(),
              .output = array.data(),
              .count = 10,
              .algorithm = Algorithm::ring};
    const auto first = group.start(call, {});
    call.timeout = std::chrono::milliseconds(200);
    ending_of([&] { group.run(call); }).check(ErrorKind::timeout, {"started before"});
    ending_of([&] { first->wait(); }).check(ErrorKind::group_broken, {"started before"});
  });
});

const ByTransport kLateMessage(
    "a message beside a collective has its own time limit", [](const std::string& by) {
      std::promise<void> over;
      run_threads(2, by, [&](Group& group) {
        if (group.rank() == 1) return over.get_future().wait();
        const AtEnd at_end{over};
        Array array = numbers(10, 1), received(Dtype::int64, 10);
        const auto first = group.start({.operation = Operation::all_reduce,
                                        .dtype = Dtype::int64,
                                        .input = array.data(),
                                        .output = array.data(),
                                        .count = 10,
                                        .algorithm = Algorithm::ring},
                                       {});
        Call call = message(Operation::recv, received, 1, 2);
        call.timeout = std::chrono::milliseconds(300);
        ending_of([&] { group.run(call); }).check(ErrorKind::timeout, {"Timed out after"});
        expect(ending_of([&] { first->wait(); }).error.has_value(), "the group is broken");
      });
    });

const ByTransport kClosed("closing ends the waits of all threads", [](const std::string& by) {
  Waiting waiting;
  World world{.size = 2, .transport = by, .interrupted = [&] { return waiting.ask(); }};
  std::promise<void> over;
  run_threads(world, [&](Group& group) {
    if (group.rank() == 1) return over.get_future().wait();
    const AtEnd at_end{over};
    std::vector<std::thread> threads;
    std::atomic<int> ended{0};
    const auto ends = [&](const std::function<void()>& call) {
      threads.emplace_back([&, call] {
        if (ending_of(call).is(ErrorKind::group_broken)) ++ended;
      });
      waiting.await(threads.back().get_id());
    };
    ends([&] { sum(group, 10); });
    ends([&] { sum(group, 20); });
    ends([&] { receive(group, 10, 0, 1, 1); });
    ends([&] { receive(group, 10, 0, 1, 2); });
    group.close();
    for (std::thread& thread : threads) thread.join();
    expect_equal(ended.load(), 4, "threads that ended with GroupBroken");
  });
});

const ByTransport kRefused("a message that does not fit ends alone", [](const std::string& by) {
  Waiting waiting;
  World world{.size = 2, .transport = by, .interrupted = [&] { return waiting.ask(); }};
  run_threads(world, [&](Group& group) {
    if (group.rank() == 1) {
      send(group, 11, 0, 0, 1);
      return sum(group, 10);
    }
    std::thread collective([&] { sum(group, 10); });
    ending_of([&] { receive(group, 10, 0, 1, 1); }).check(ErrorKind::mismatch, {"count 11"});
    collective.join();
  });
});

}  // namespace
