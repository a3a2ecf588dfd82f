// Failures of a group other than deaths: ranks that disagree, do not join, abort or leave. Deaths
// are in death_test.cpp.
#include <future>
#include <random>
#include <string>
#include <vector>

#include "calls.h"
#include "collectives/choose.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace ranks;
using namespace std::chrono_literals;

constexpr size_t kSmall = 500, kLarge = 300'000;  // floats; the large ones fill every buffer

// The arrays of a call.
struct Buffers {
  Buffers(int size, const Call& c)
      : input(c.dtype, c.count * (c.operation == Operation::reduce_scatter ? uint32_t(size) : 1)),
        output(c.dtype, c.count * (c.operation == Operation::all_gather ? uint32_t(size) : 1)) {}
  Call with(Call call) {
    call.input = input.data();
    call.output = output.data();
    return call;
  }
  bool operator==(const Buffers&) const = default;
  Array input, output;
};

// The call of most ranks with one difference.
std::vector<Call> variants_of(const Call& call) {
  std::vector<Call> others;
  const auto add = [&](auto change) {
    others.push_back(call);
    change(others.back());
  };
  if (call.operation != Operation::barrier) {
    add([](Call& c) { c.operation = Operation::barrier, c.algorithm = Algorithm::automatic; });
    add([](Call& c) { ++c.count; });
    add([](Call& c) { c.dtype = Dtype::int32; });
  }
  if (call.operation == Operation::all_reduce || call.operation == Operation::reduce_scatter)
    add([](Call& c) { c.op = ReduceOp::max; });
  if (call.operation != Operation::all_gather)
    add([](Call& c) {
      c.operation = Operation::all_gather, c.algorithm = Algorithm::tree, c.count = 500;
    });
  if (call.operation != Operation::broadcast)
    add([](Call& c) {
      c.operation = Operation::broadcast, c.algorithm = Algorithm::ring, c.count = 500;
    });
  for (const Algorithm algorithm : collectives::algorithms_for(call.operation))
    if (algorithm != call.algorithm && call.operation != Operation::barrier)
      add([=](Call& c) { c.algorithm = algorithm; });
  return others;
}

// The calls in which every rank receives from every other.
std::vector<Call> two_way_calls(size_t count) {
  std::vector<Call> calls{{.operation = Operation::barrier}};
  for (const Operation operation :
       {Operation::all_reduce, Operation::all_gather, Operation::reduce_scatter})
    for (const Algorithm algorithm : collectives::algorithms_for(operation))
      calls.push_back({.operation = operation,
                       .dtype = Dtype::float32,
                       .count = count,
                       .algorithm = algorithm});
  return calls;
}

// A correct call, which must work after earlier failures.
void expect_sound(Group& group, size_t count, int call = 0) {
  const auto algorithms = collectives::algorithms_for(Operation::all_reduce);
  run_plain(group,
            {Operation::all_reduce, algorithms[static_cast<size_t>(call) % algorithms.size()],
             Dtype::float32, ReduceOp::sum, count, 0, true, call});
}

// One rank makes another call than the rest: all must report it, and no array may change.
void disagree(Group& group, const Call& call, const Call& other, int odd) {
  const Call mine = group.rank() == odd ? other : call;
  Buffers arrays(group.size(), mine);
  const Ending ending = ending_of([&] { group.run(arrays.with(mine)); });
  const std::string what =
      std::string(name_of(call.operation)) + " " + std::string(name_of(call.algorithm)) +
      " against " + std::string(name_of(other.operation)) + " " +
      std::string(name_of(other.algorithm)) + " on rank " + std::to_string(odd) + ": ";
  expect(ending.is(ErrorKind::mismatch), what + ending.text());
  expect(ending.says("rank " + std::to_string(odd) + " ") && ending.says("disagree") &&
             ending.says(std::string(name_of(call.operation)) + "(") &&
             ending.says(std::string(name_of(other.operation)) + "("),
         what + "both sides are named: " + ending.text());
  expect(arrays == Buffers(group.size(), mine), what + "an array was changed");
}

const ByTransport kDisagree("all ranks report any difference in one rank's call, and continue",
                            [](const std::string& by) {
                              for (int size = 2; size <= 4; ++size)
                                run_groups(size, by, [](Group& group) {
                                  int n = 0;
                                  for (const Call& call : two_way_calls(kSmall))
                                    for (const Call& other : variants_of(call)) {
                                      // A broadcast's root does not listen: against it, only the
                                      // others hear at once.
                                      if (other.operation == Operation::broadcast) continue;
                                      disagree(group, call, other, n % group.size());
                                      if (++n % 4 == 0) expect_sound(group, kSmall, n);
                                    }
                                  for (int i = 0; i < 20; ++i) expect_sound(group, kSmall, i);
                                });
                            });

const ByTransport kDisagreeLarge(
    "frames that are half sent at a disagreement do no harm", [](const std::string& by) {
      for (const int size : {2, 4})
        run_groups(size, by, [](Group& group) {
          std::mt19937 random(5);
          const auto calls = two_way_calls(kLarge);
          for (int i = 0; i < (kSlowdown > 1 ? 4 : 12); ++i) {
            const Call& call = calls[1 + random() % (calls.size() - 1)];
            auto others = variants_of(call);
            std::erase_if(others,
                          [](const Call& c) { return c.operation == Operation::broadcast; });
            disagree(group, call, others[random() % others.size()], i % group.size());
            if (i % 4 == 3) expect_sound(group, kLarge, i / 4);
          }
        });
    });

const ByGroups kAllDiffer("every rank makes another call", 4, [](Group& group) {
  for (int i = 0; i < 10; ++i) {
    Call call{.operation = Operation::all_reduce,
              .dtype = Dtype::float32,
              .count = kSmall,
              .algorithm = Algorithm::direct};
    call.count += static_cast<size_t>(group.rank());
    Buffers arrays(4, call);
    ending_of([&] { group.run(arrays.with(call)); }).check(ErrorKind::mismatch);
  }
  expect_sound(group, kSmall);
});

const ByTransport kOneWay(
    "a broadcast that ranks disagree about ends at the next barrier", [](const std::string& by) {
      for (int size = 2; size <= 4; ++size)
        run_groups(size, by, [](Group& group) {
          for (const Algorithm algorithm : collectives::algorithms_for(Operation::broadcast))
            for (int odd = 0; odd < group.size(); ++odd) {
              for (const size_t count : {kSmall, odd == 1 && group.size() == 3 ? kLarge : 0}) {
                Call call{.operation = Operation::broadcast,
                          .dtype = Dtype::float32,
                          .count = count,
                          .algorithm = algorithm};
                if (group.rank() == odd) ++call.count;
                Buffers arrays(group.size(), call);
                const Array before = arrays.output;
                bool through = false;
                ending_of([&] {
                  group.run(arrays.with(call));
                  through = true;
                  group.run({.operation = Operation::barrier});
                }).check(ErrorKind::mismatch, {"broadcast("});
                expect(group.rank() != odd || odd == 0 || !through, "the odd rank succeeded");
                expect((group.rank() != odd && odd != 0) || arrays.output == before,
                       "an array was changed");
                expect_sound(group, count, odd);
              }
            }
        });
    });

const ByGroups kInOrder(
    "a message in transit is not truncated by a disagreement", 3, [](Group& group) {
      for (int i = 0; i < 5; ++i) {
        Array array(Dtype::float32, kLarge);
        const auto fill = [&](Array& a) { a.fill([&](size_t j) { return element(i, j); }); };
        fill(array);
        const Array truth = array;
        if (group.rank() == 0) group.run(message(Operation::send, array, 1));
        disagree(group, {.operation = Operation::all_reduce, .dtype = Dtype::float32, .count = 9},
                 {.operation = Operation::barrier}, 2);
        if (group.rank() == 1) {
          array = Array(Dtype::float32, kLarge);
          group.run(message(Operation::recv, array, 0));
          expect(array == truth, "the message was truncated");
        }
      }
      expect_sound(group, kSmall);
    });

const ByGroups kUncut("a notice of an earlier call does not truncate a message", 2,
                      [](Group& group) {
                        for (int i = 0; i < 5; ++i) {
                          Array array(Dtype::float32, kLarge);
                          array.fill([&](size_t j) { return element(i, j); });
                          const Array truth = array;
                          Call broadcast{.operation = Operation::broadcast,
                                         .dtype = Dtype::float32,
                                         .output = array.data(),
                                         .count = kSmall,
                                         .algorithm = Algorithm::tree};
                          if (group.rank() == 0) {
                            group.run(
                                broadcast);  // the root does not know rank 1's other count yet
                            group.run(message(Operation::send, array, 1));
                            ending_of([&] {
                              group.run({.operation = Operation::barrier});
                            }).check(ErrorKind::mismatch);
                          } else {
                            ++broadcast.count;
                            ending_of([&] { group.run(broadcast); }).check(ErrorKind::mismatch);
                            array = Array(Dtype::float32, kLarge);
                            group.run(message(Operation::recv, array, 0));
                            expect(array == truth, "the message was truncated");
                          }
                          expect_sound(group, kSmall);
                        }
                      });

const ByGroups kBothSend("after a disagreement both sides send before they receive", 2,
                         [](Group& group) {
                           for (int i = 0; i < 5; ++i) {
                             disagree(group, {.operation = Operation::all_reduce, .count = 9}, {},
                                      i % 2);
                             const int peer = 1 - group.rank();
                             Array mine(Dtype::float64, 2 * kLarge),
                                 theirs(Dtype::float64, 2 * kLarge);
                             mine.fill([&](size_t j) { return element(group.rank(), j); });
                             group.run(message(Operation::send, mine, peer));
                             group.run(message(Operation::recv, theirs, peer));
                             mine.fill([&](size_t j) { return element(peer, j); });
                             expect(mine == theirs, "another message arrived");
                           }
                         });

// All but `missing` make the call, which times out; `missing` calls after that.
void expect_timeout(const std::string& by, int size, int missing, const Call& call) {
  std::vector<std::promise<void>> over(static_cast<size_t>(size));
  run_groups(size, by, [&](Group& group) {
    Buffers arrays(size, call);
    Call mine = arrays.with(call);
    mine.timeout = 100ms;
    if (group.rank() == missing) {
      for (int rank = 0; rank < size; ++rank)
        if (rank != missing) over[static_cast<size_t>(rank)].get_future().wait();
      // The data sent before the timeout may complete this call; the next one must fail.
      const Ending late = ending_of([&] {
        for (int i = 0; i < 2; ++i) group.run(mine);
      });
      expect(late.error && late.says("imed out"), "the late rank:  " + late.text());
      return;
    }
    const Ending ending = ending_of([&] { group.run(mine); });
    over[static_cast<size_t>(group.rank())].set_value();
    ending.check(ErrorKind::timeout);
    expect(ending.says("rank " + std::to_string(missing) + " ") &&
               ending.error->fields().peer == missing,
           "the missing rank is named:  " + ending.text());
    expect(ending.seconds < 1.1, "it took " + std::to_string(ending.seconds) + " s");
    ending_of([&] {
      group.run({.operation = Operation::barrier});
    }).check(ErrorKind::group_broken, {"imed out"});
  });
}

const ByTransport kTimeout("all ranks name a missing rank in time", [](const std::string& by) {
  expect_timeout(by, 2, 1, {.operation = Operation::barrier});
  expect_timeout(by, 4, 2, {.operation = Operation::barrier});
  for (const Algorithm algorithm : collectives::algorithms_for(Operation::all_reduce))
    expect_timeout(by, 4, 1,
                   {.operation = Operation::all_reduce,
                    .dtype = Dtype::float32,
                    .count = kSmall,
                    .algorithm = algorithm});
});

const ByTransport kLonely("a message without a sender or a receiver times out",
                          [](const std::string& by) {
                            for (const Operation operation : {Operation::send, Operation::recv}) {
                              std::promise<void> over;
                              run_groups(2, by, [&](Group& group) {
                                if (group.rank() == 1) return over.get_future().wait();
                                const Call call{.operation = operation,
                                                .dtype = Dtype::float64,
                                                .count = 4 * kLarge,
                                                .peer = 1,
                                                .timeout = 200ms};
                                Buffers arrays(2, call);
                                const Ending ending =
                                    ending_of([&] { group.run(arrays.with(call)); });
                                over.set_value();
                                ending.check(ErrorKind::timeout, {}, 1);
                                expect(ending.seconds < 1.2,
                                       "it took " + std::to_string(ending.seconds) + " s");
                              });
                            }
                          });

const ByTransport kAbort("abort ends the calls of all ranks, with its reason",
                         [](const std::string& by) {
                           std::promise<void> over;
                           std::shared_future<void> done = over.get_future();
                           run_groups(3, by, [&](Group& group) {
                             const Call call{.operation = Operation::barrier};
                             if (group.rank() == 0) {
                               run(2, [&](int thread) {
                                 if (thread == 1) return group.abort("enough is enough");
                                 ending_of([&] {
                                   group.run(call);
                                 }).check(ErrorKind::group_broken, {"enough is enough"});
                               });
                               group.abort("twice is fine");
                             } else if (group.rank() == 1) {
                               // Held until the error is read: the thread sanitizer does not see
                               // the C++ library's reference count of an exception, but it sees
                               // that of the work.
                               const auto work = group.start(call, {});
                               const Ending ending = ending_of([&] { work->wait(); });
                               over.set_value();
                               ending.check(ErrorKind::group_broken, {"enough is enough"});
                             } else {
                               done.wait();
                             }
                             // The data sent before the abort may complete a first call.
                             ending_of([&] {
                               for (int i = 0; i < 2; ++i) group.run(call);
                             }).check(ErrorKind::group_broken, {"enough is enough"});
                           });
                         });

const ByGroups kLeave("only ranks that need a rank that left fail", 2, [](Group& group) {
  const Call call{.operation = Operation::barrier};
  expect_sound(group, kLarge);
  if (group.rank() == 1) {
    group.close();
    group.close();
    for (const bool async : {false, true})
      expect(ending_of([&] {
               async ? (void)group.start(call, {}) : group.run(call);
             }).is(ErrorKind::group_broken),
             "a call after close");
    return;
  }
  ending_of([&] { group.run(call); }).check(ErrorKind::peer_lost, {"left"}, 1);
  ending_of([&] { group.run(call); }).check(ErrorKind::group_broken, {"left"});
});

const ByGroups kCloseInside("closing ends the call of another thread", 2, [](Group& group) {
  std::promise<void> inside;
  if (group.rank() == 1) return (void)ending_of([&] { group.run({}); });
  run(2, [&](int thread) {
    if (thread == 1) {
      inside.get_future().wait();
      return group.close();
    }
    Array array(Dtype::uint8, 1);
    inside.set_value();
    const Ending ending = ending_of([&] {
      group.run({.operation = Operation::recv, .output = array.data(), .count = 1, .peer = 1});
    });
    expect(ending.error.has_value(), "the call continued without its group");
  });
});

const Test kFromThen("a callback that ends its own group does not hang", [] {
  run_groups(2, "local", [](Group& group) {
    std::promise<void> aborted;
    const auto work = group.start({}, [&](std::exception_ptr) {
      group.abort("from a callback");
      aborted.set_value();
    });
    aborted.get_future().wait();
    expect(ending_of([&] { group.run({}); }).is(ErrorKind::group_broken), "a call after an abort");
  });
  World world{.size = 2, .transport = "local"};
  run(2, [&](int rank) {
    auto group = world.join(rank);
    std::promise<void> gone;
    auto* held = new std::shared_ptr<Group>(group);
    const auto work = group->start({}, [&, held](std::exception_ptr) {
      delete held;  // perhaps the last reference to the group
      gone.set_value();
    });
    group.reset();
    gone.get_future().wait();
  });
});

const Test kOptions("ranks with different options do not form a group", [] {
  World world{.size = 2, .transport = "tcp"};
  run(2, [&](int rank) {
    ending_of([&] {
      (void)world.join(rank, rank == 1);
    }).check(ErrorKind::mismatch, {"reproducible"});
  });
});

}  // namespace
