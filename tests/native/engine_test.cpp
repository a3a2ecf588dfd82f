// Failures of a group other than deaths: ranks that disagree, do not join, abort or leave. Deaths
// are in death_test.cpp.
#include <algorithm>
#include <functional>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collectives/choose.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;
using ranks::Array;
using ranks::ByTransport;
using ranks::element;
using ranks::Ending;
using ranks::ending_of;
using ranks::kSlowdown;

constexpr size_t kSmall = 500, kLarge = 300'000;  // floats; the large ones fill every buffer

// The arrays of a call.
struct Arrays {
  Arrays(int size, const group::Call& c)
      : input(c.dtype, c.count * (c.operation == Operation::reduce_scatter ? uint32_t(size) : 1)),
        output(c.dtype, c.count * (c.operation == Operation::all_gather ? uint32_t(size) : 1)) {}
  group::Call with(group::Call call) {
    call.input = input.data();
    call.output = output.data();
    return call;
  }
  bool operator==(const Arrays&) const = default;
  Array input, output;
};

// The call of most ranks with one difference.
std::vector<group::Call> variants_of(const group::Call& call) {
  std::vector<group::Call> others;
  const auto add = [&](auto change) {
    others.push_back(call);
    change(others.back());
  };
  if (call.operation != Operation::barrier) {
    add([](group::Call& c) {
      c.operation = Operation::barrier, c.algorithm = Algorithm::automatic;
    });
    add([](group::Call& c) { ++c.count; });
    add([](group::Call& c) { c.dtype = Dtype::int32; });
  }
  if (call.operation == Operation::all_reduce || call.operation == Operation::reduce_scatter)
    add([](group::Call& c) { c.op = ReduceOp::max; });
  if (call.operation != Operation::all_gather)
    add([](group::Call& c) {
      c.operation = Operation::all_gather, c.algorithm = Algorithm::tree, c.count = 500;
    });
  if (call.operation != Operation::broadcast)
    add([](group::Call& c) {
      c.operation = Operation::broadcast, c.algorithm = Algorithm::ring, c.count = 500;
    });
  for (const Algorithm algorithm : collectives::algorithms_for(call.operation))
    if (algorithm != call.algorithm && call.operation != Operation::barrier)
      add([=](group::Call& c) { c.algorithm = algorithm; });
  return others;
}

// The calls in which every rank receives from every other.
std::vector<group::Call> two_way_calls(size_t count) {
  std::vector<group::Call> calls{{.operation = Operation::barrier}};
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
void expect_sound(group::Group& group, size_t count, int call = 0) {
  Array array(Dtype::float32, count), want(Dtype::float32, count);
  array.fill([&](size_t i) { return element(group.rank(), i, call); });
  want.fill([&](size_t i) {
    int sum = 0;
    for (int rank = 0; rank < group.size(); ++rank) sum += element(rank, i, call);
    return sum;
  });
  const auto algorithms = collectives::algorithms_for(Operation::all_reduce);
  group.run({.operation = Operation::all_reduce,
             .dtype = Dtype::float32,
             .input = array.data(),
             .output = array.data(),
             .count = count,
             .algorithm = algorithms[static_cast<size_t>(call) % algorithms.size()]});
  expect(array == want, "a correct call after a failed one is wrong");
}

// One rank makes another call than the rest: all must report it, and no array may change.
void disagree(group::Group& group, const group::Call& call, const group::Call& other, int odd) {
  const group::Call mine = group.rank() == odd ? other : call;
  Arrays arrays(group.size(), mine);
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
  expect(arrays == Arrays(group.size(), mine), what + "an array was changed");
}

const ByTransport kDisagree{"all ranks report any difference in one rank's call, and continue",
                            [](const std::string& by) {
                              for (int size = 2; size <= 4; ++size)
                                ranks::run_groups(size, by, [](group::Group& group) {
                                  int n = 0;
                                  for (const group::Call& call : two_way_calls(kSmall))
                                    for (const group::Call& other : variants_of(call)) {
                                      // A broadcast's root does not listen: against it, only the
                                      // others hear at once.
                                      if (other.operation == Operation::broadcast) continue;
                                      disagree(group, call, other, n % group.size());
                                      if (++n % 4 == 0) expect_sound(group, kSmall, n);
                                    }
                                  for (int i = 0; i < 20; ++i) expect_sound(group, kSmall, i);
                                });
                            }};

const ByTransport kDisagreeLarge{
    "frames that are half sent at a disagreement do no harm", [](const std::string& by) {
      for (const int size : {2, 4})
        ranks::run_groups(size, by, [](group::Group& group) {
          std::mt19937 random(5);
          const auto calls = two_way_calls(kLarge);
          for (int i = 0; i < (kSlowdown > 1 ? 4 : 12); ++i) {
            const group::Call& call = calls[1 + random() % (calls.size() - 1)];
            auto others = variants_of(call);
            std::erase_if(others,
                          [](const group::Call& c) { return c.operation == Operation::broadcast; });
            disagree(group, call, others[random() % others.size()], i % group.size());
            if (i % 4 == 3) expect_sound(group, kLarge, i / 4);
          }
        });
    }};

const ranks::ByGroups kDisagreeOften{
    "50 disagreements in a row", 4, [](group::Group& group) {
      std::mt19937 random(11);
      for (int i = 0; i < 50; ++i) {
        const auto calls = two_way_calls(random() % 8 == 0 ? kLarge / 4 : kSmall);
        const group::Call& call = calls[random() % calls.size()];
        auto others = variants_of(call);
        std::erase_if(others,
                      [](const group::Call& c) { return c.operation == Operation::broadcast; });
        disagree(group, call, others[random() % others.size()], static_cast<int>(random() % 4));
      }
      for (int i = 0; i < 20; ++i) expect_sound(group, kSmall, i);
    }};

const ranks::ByGroups kAllDiffer{"every rank makes another call", 4, [](group::Group& group) {
                                   for (int i = 0; i < 10; ++i) {
                                     group::Call call{.operation = Operation::all_reduce,
                                                      .dtype = Dtype::float32,
                                                      .count = kSmall,
                                                      .algorithm = Algorithm::direct};
                                     call.count += static_cast<size_t>(group.rank());
                                     Arrays arrays(4, call);
                                     const Ending ending =
                                         ending_of([&] { group.run(arrays.with(call)); });
                                     expect(ending.is(ErrorKind::mismatch), ending.text());
                                   }
                                   expect_sound(group, kSmall);
                                 }};

const ByTransport kOneWay{
    "a broadcast that ranks disagree about ends at the next barrier", [](const std::string& by) {
      for (int size = 2; size <= 4; ++size)
        ranks::run_groups(size, by, [](group::Group& group) {
          for (const Algorithm algorithm : collectives::algorithms_for(Operation::broadcast))
            for (int odd = 0; odd < group.size(); ++odd) {
              for (const size_t count : {kSmall, odd == 1 && group.size() == 3 ? kLarge : 0}) {
                group::Call call{.operation = Operation::broadcast,
                                 .dtype = Dtype::float32,
                                 .count = count,
                                 .algorithm = algorithm};
                if (group.rank() == odd) ++call.count;
                Arrays arrays(group.size(), call);
                const Array before = arrays.output;
                bool through = false;
                const Ending ending = ending_of([&] {
                  group.run(arrays.with(call));
                  through = true;
                  group.run({.operation = Operation::barrier});
                });
                expect(ending.is(ErrorKind::mismatch) && ending.says("broadcast("), ending.text());
                expect(group.rank() != odd || odd == 0 || !through, "the odd rank succeeded");
                expect((group.rank() != odd && odd != 0) || arrays.output == before,
                       "an array was changed");
                expect_sound(group, count, odd);
              }
            }
        });
    }};

const ranks::ByGroups kInOrder{
    "a message in transit is not truncated by a disagreement", 3, [](group::Group& group) {
      for (int i = 0; i < 5; ++i) {
        Array array(Dtype::float32, kLarge);
        const auto fill = [&](Array& a) { a.fill([&](size_t j) { return element(i, j); }); };
        const auto move = [&](Operation operation, int peer) {
          group.run({.operation = operation,
                     .dtype = Dtype::float32,
                     .input = array.data(),
                     .output = array.data(),
                     .count = kLarge,
                     .peer = peer});
        };
        fill(array);
        const Array truth = array;
        if (group.rank() == 0) move(Operation::send, 1);
        disagree(group, {.operation = Operation::all_reduce, .dtype = Dtype::float32, .count = 9},
                 {.operation = Operation::barrier}, 2);
        if (group.rank() == 1) {
          array = Array(Dtype::float32, kLarge);
          move(Operation::recv, 0);
          expect(array == truth, "the message was truncated");
        }
      }
      expect_sound(group, kSmall);
    }};

const ranks::ByGroups kUncut{
    "a notice of an earlier call does not truncate a message", 2, [](group::Group& group) {
      for (int i = 0; i < 5; ++i) {
        Array array(Dtype::float32, kLarge);
        array.fill([&](size_t j) { return element(i, j); });
        const Array truth = array;
        group::Call broadcast{.operation = Operation::broadcast,
                              .dtype = Dtype::float32,
                              .output = array.data(),
                              .count = kSmall,
                              .algorithm = Algorithm::tree};
        group::Call message{.dtype = Dtype::float32, .count = kLarge, .peer = 1 - group.rank()};
        if (group.rank() == 0) {
          group.run(broadcast);  // the root does not know rank 1's other count yet
          message.operation = Operation::send;
          message.input = array.data();
          group.run(message);
          const Ending ending = ending_of([&] { group.run({.operation = Operation::barrier}); });
          expect(ending.is(ErrorKind::mismatch), ending.text());
        } else {
          ++broadcast.count;
          const Ending ending = ending_of([&] { group.run(broadcast); });
          expect(ending.is(ErrorKind::mismatch), ending.text());
          array = Array(Dtype::float32, kLarge);
          message.operation = Operation::recv;
          message.output = array.data();
          group.run(message);
          expect(array == truth, "the message was truncated");
        }
        expect_sound(group, kSmall);
      }
    }};

const ranks::ByGroups kBothSend{
    "after a disagreement both sides send before they receive", 2, [](group::Group& group) {
      for (int i = 0; i < 5; ++i) {
        disagree(group, {.operation = Operation::all_reduce, .count = 9}, {}, i % 2);
        const int peer = 1 - group.rank();
        Array mine(Dtype::float64, 2 * kLarge), theirs(Dtype::float64, 2 * kLarge);
        mine.fill([&](size_t j) { return element(group.rank(), j); });
        const auto move = [&](Operation operation, Array& array) {
          group.run({.operation = operation,
                     .dtype = Dtype::float64,
                     .input = array.data(),
                     .output = array.data(),
                     .count = 2 * kLarge,
                     .peer = peer});
        };
        move(Operation::send, mine);
        move(Operation::recv, theirs);
        mine.fill([&](size_t j) { return element(peer, j); });
        expect(mine == theirs, "another message arrived");
      }
    }};

// All but `missing` make the call, which times out; `missing` calls after that.
void expect_timeout(const std::string& by, int size, int missing, const group::Call& call) {
  std::vector<std::promise<void>> over(static_cast<size_t>(size));
  ranks::run_groups(size, by, [&](group::Group& group) {
    Arrays arrays(size, call);
    group::Call mine = arrays.with(call);
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
    expect(ending.is(ErrorKind::timeout), ending.text());
    expect(ending.says("rank " + std::to_string(missing) + " ") &&
               ending.error->fields().peer == missing,
           "the missing rank is named:  " + ending.text());
    expect(ending.seconds < 1.1, "it took " + std::to_string(ending.seconds) + " s");
    const Ending again = ending_of([&] { group.run({.operation = Operation::barrier}); });
    expect(again.is(ErrorKind::group_broken) && again.says("imed out"), again.text());
  });
}

const ByTransport kTimeout{
    "all ranks name a missing rank in time", [](const std::string& by) {
      expect_timeout(by, 2, 1, {.operation = Operation::barrier});
      expect_timeout(by, 4, 2, {.operation = Operation::barrier});
      for (const Algorithm algorithm : collectives::algorithms_for(Operation::all_reduce))
        expect_timeout(by, 4, 1,
                       {.operation = Operation::all_reduce,
                        .dtype = Dtype::float32,
                        .count = kSmall,
                        .algorithm = algorithm});
    }};

const ByTransport kLonely{
    "a message without a sender or a receiver times out", [](const std::string& by) {
      for (const Operation operation : {Operation::send, Operation::recv}) {
        std::promise<void> over;
        ranks::run_groups(2, by, [&](group::Group& group) {
          if (group.rank() == 1) return over.get_future().wait();
          const group::Call call{.operation = operation,
                                 .dtype = Dtype::float64,
                                 .count = 4 * kLarge,
                                 .peer = 1,
                                 .timeout = 200ms};
          Arrays arrays(2, call);
          const Ending ending = ending_of([&] { group.run(arrays.with(call)); });
          over.set_value();
          expect(ending.is(ErrorKind::timeout) && ending.error->fields().peer == 1, ending.text());
          expect(ending.seconds < 1.2, "it took " + std::to_string(ending.seconds) + " s");
        });
      }
    }};

const ByTransport kAbort{
    "abort ends the calls of all ranks, with its reason", [](const std::string& by) {
      std::promise<void> over;
      std::shared_future<void> done = over.get_future();
      ranks::run_groups(3, by, [&](group::Group& group) {
        const group::Call call{.operation = Operation::barrier};
        if (group.rank() == 0) {
          ranks::run(2, [&](int thread) {
            if (thread == 1) return group.abort("enough is enough");
            const Ending ending = ending_of([&] { group.run(call); });
            expect(ending.is(ErrorKind::group_broken) && ending.says("enough is enough"),
                   ending.text());
          });
          group.abort("twice is fine");
        } else if (group.rank() == 1) {
          // Held until the error is read: the thread sanitizer does not see the C++ library's
          // reference count of an exception, but it sees that of the work.
          const auto work = group.start(call, {});
          const Ending ending = ending_of([&] { work->wait(); });
          over.set_value();
          expect(ending.is(ErrorKind::group_broken) && ending.says("enough is enough"),
                 ending.text());
        } else {
          done.wait();
        }
        // The data sent before the abort may complete a first call.
        const Ending later = ending_of([&] {
          for (int i = 0; i < 2; ++i) group.run(call);
        });
        expect(later.is(ErrorKind::group_broken) && later.says("enough is enough"), later.text());
      });
    }};

const ranks::ByGroups kLeave{
    "only ranks that need a rank that left fail", 2, [](group::Group& group) {
      const group::Call call{.operation = Operation::barrier};
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
      const Ending ending = ending_of([&] { group.run(call); });
      expect(ending.is(ErrorKind::peer_lost) && ending.says("left") &&
                 ending.error->fields().peer == 1,
             ending.text());
      const Ending again = ending_of([&] { group.run(call); });
      expect(again.is(ErrorKind::group_broken) && again.says("left"), again.text());
    }};

const ranks::ByGroups kCloseInside{
    "closing ends the call of another thread", 2, [](group::Group& group) {
      std::promise<void> inside;
      if (group.rank() == 1) return (void)ending_of([&] { group.run({}); });
      ranks::run(2, [&](int thread) {
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
    }};

const Test kFromThen{"a callback that ends its own group does not hang", [] {
                       ranks::run_groups(2, "local", [](group::Group& group) {
                         std::promise<void> aborted;
                         const auto work = group.start({}, [&](std::exception_ptr) {
                           group.abort("from a callback");
                           aborted.set_value();
                         });
                         aborted.get_future().wait();
                         expect(ending_of([&] { group.run({}); }).is(ErrorKind::group_broken),
                                "a call after an abort");
                       });
                       ranks::World world{.size = 2, .transport = "local"};
                       ranks::run(2, [&](int rank) {
                         auto group = world.join(rank);
                         std::promise<void> gone;
                         auto* held = new std::shared_ptr<group::Group>(group);
                         const auto work = group->start({}, [&, held](std::exception_ptr) {
                           delete held;  // perhaps the last reference to the group
                           gone.set_value();
                         });
                         group.reset();
                         gone.get_future().wait();
                       });
                     }};

const Test kForming{
    "a group that does not form names the missing ranks in time", [] {
      ranks::World world{.size = 3, .transport = "tcp", .timeout = 400ms};
      ranks::run(2, [&](int rank) {
        const Ending ending = ending_of([&] { (void)world.join(rank); });
        expect(ending.is(ErrorKind::timeout) && ending.says("did not join: 2"), ending.text());
        expect(ending.seconds < 1.4, "it took " + std::to_string(ending.seconds) + " s");
      });
    }};

const Test kOptions{"ranks with different options do not form a group", [] {
                      ranks::World world{.size = 2, .transport = "tcp"};
                      ranks::run(2, [&](int rank) {
                        const Ending ending = ending_of([&] { (void)world.join(rank, rank == 1); });
                        expect(ending.is(ErrorKind::mismatch) && ending.says("reproducible"),
                               ending.text());
                      });
                    }};

}  // namespace
