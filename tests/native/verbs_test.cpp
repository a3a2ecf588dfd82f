// Verbs beyond group_test.cpp: counts by rank, long arrays, messages from any rank, and ranks that
// disagree about a root, a list or an operation, after which the group continues.
#include <deque>
#include <latch>
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

// A correct call, which must work after earlier failures.
void expect_sound(Group& group) {
  run_plain(group, {Operation::all_reduce, Algorithm::direct, Dtype::float32, ReduceOp::sum, 50, 0,
                    true, 1});
}

// A count for each rank, or each pair; some are 0, or all.
std::vector<size_t> some_counts(std::mt19937& random, size_t n) {
  std::vector<size_t> counts(n);
  const uint32_t most = random() % 8 == 0 ? 1 : random() % 4 == 0 ? 40'000 : 300;
  for (size_t& count : counts) count = random() % 4 == 0 ? 0 : random() % most;
  return counts;
}

const ByTransport kCounts("counts by rank, some of them 0", [](const std::string& by) {
  for (int size = 1; size <= 5; ++size)
    run_groups(size, by, [&](Group& group) {
      std::mt19937 random(9);
      const auto n = static_cast<size_t>(size);
      for (int call = 0; call < 40 / kSlowdown + 2; ++call)
        for (const Operation operation : {Operation::all_gather, Operation::all_to_all})
          for (const Algorithm algorithm : collectives::algorithms_for(operation, true)) {
            Case c{operation, algorithm, Dtype::float32, ReduceOp::sum, 0, 0, call % 2 == 0, call};
            c.counts = some_counts(random, operation == Operation::all_to_all ? n * n : n);
            if (call % 3 == 0) c.dtype = Dtype::bfloat16;
            run_case(group, c);
          }
    });
});

// As long as plans with pieces begin, which group_test.cpp leaves out where that is slow.
const ByTransport kLong("long arrays by every algorithm", [](const std::string& by) {
  for (const int size : {2, 3, 5}) {
    if (kSlowdown > 1 && size == 2) continue;
    run_groups(size, by, [](Group& group) {
      int call = 0;
      for (const Operation operation :
           {Operation::all_reduce, Operation::broadcast, Operation::all_gather,
            Operation::reduce_scatter, Operation::reduce, Operation::gather, Operation::scatter,
            Operation::all_to_all})
        for (const Algorithm algorithm : collectives::algorithms_for(operation)) {
          Case c{operation, algorithm, Dtype::uint8, ReduceOp::max, 65'541, 0, false, ++call};
          if (c.rooted()) c.root = call % group.size();
          c.in_place = call % 2 == 0;
          run_case(group, c);
        }
    });
  }
});

// One rank makes another call than the rest. All notice at the next barrier at the latest.
void disagree(Group& group, const Call& mine, const std::string& what) {
  const Ending ending = ending_of([&] {
    group.run(mine);
    group.run({.operation = Operation::barrier});
  });
  expect(ending.is(ErrorKind::mismatch) && ending.says("disagree"), what + ending.text());
  expect_sound(group);
}

const ByTransport kDifferent(
    "other roots, ops and counts: all report it by the next barrier", [](const std::string& by) {
      for (int size = 2; size <= 4; ++size) {
        // Two that wait for each other learn it from heartbeats: five are sent in this time.
        World world{.size = size, .transport = by, .heartbeat = std::chrono::seconds(5)};
        run_groups(world, [&](Group& group) {
          const auto size = static_cast<size_t>(group.size());
          for (const Operation operation :
               {Operation::reduce, Operation::gather, Operation::scatter, Operation::all_to_all})
            for (int odd = 0; odd < group.size(); ++odd)
              for (int kind = 0; kind < 3; ++kind) {
                if (kind == 0 && operation == Operation::all_to_all) continue;  // has no root
                // Threads of one process do not pulse: those that wait for each other time out.
                if (kind == 0 && by == "local") continue;
                if (kind == 2 && operation != Operation::reduce) continue;  // has no op
                Array in(Dtype::float32, 20 * size), out(Dtype::float32, 20 * size);
                Call call{.operation = operation,
                          .dtype = Dtype::float32,
                          .input = in.data(),
                          .output = out.data(),
                          .count = 10};
                if (group.rank() == odd) {
                  if (kind == 0) call.peer = 1;
                  if (kind == 1) call.count = 11;
                  if (kind == 2) call.op = ReduceOp::max;
                }
                disagree(group, call,
                         std::string(name_of(operation)) + " kind " + std::to_string(kind) +
                             " rank " + std::to_string(odd) + ": ");
              }
        });
      }
    });

// Calls in which no rank waits for another, so that all finish them, and some rank gets neither too
// much nor too little: it only learns that the others made other calls.
const ByTransport kThrough(
    "a rank that a wrong root does not affect reports it by the next barrier",
    [](const std::string& by) {
      struct Story {
        Operation operation;
        Algorithm algorithm;
        int odd, root;
      };
      for (const int size : {3, 5, 9})
        run_groups(size, by, [&](Group& group) {
          const auto n = static_cast<size_t>(group.size());
          const int last = group.size() - 1;
          for (const Story& story : {Story{Operation::gather, Algorithm::direct, 0, 1},
                                     Story{Operation::gather, Algorithm::tree, 0, last},
                                     Story{Operation::reduce, Algorithm::direct, 0, 1},
                                     Story{Operation::scatter, Algorithm::direct, last, last},
                                     Story{Operation::broadcast, Algorithm::direct, last, last},
                                     Story{Operation::broadcast, Algorithm::tree, last, last}}) {
            Array in(Dtype::float32, 10 * n), out(Dtype::float32, 10 * n);
            disagree(group,
                     {.operation = story.operation,
                      .dtype = Dtype::float32,
                      .input = in.data(),
                      .output = out.data(),
                      .count = 10,
                      .peer = group.rank() == story.odd ? story.root : 0,
                      .algorithm = story.algorithm},
                     std::string(name_of(story.operation)) + " of " + std::to_string(size) + ": ");
          }
        });
    });

const ByGroups kLists(
    "lists that do not fit are reported before arrays change", 3, [](Group& group) {
      for (const bool to_all : {false, true}) {
        Array in(Dtype::int64, 30), out(Dtype::int64, 30);
        const Array before = out;
        Call call{.operation = to_all ? Operation::all_to_all : Operation::all_gather,
                  .dtype = Dtype::int64,
                  .input = in.data(),
                  .output = out.data()};
        call.counts = to_all ? std::vector<size_t>(6, 4) : std::vector<size_t>{2, 3, 4};
        // The same sum on both sides of the disagreement.
        if (group.rank() == 1 && to_all) call.counts = {3, 4, 5, 4, 4, 4};
        if (group.rank() == 1 && !to_all) call.counts = {3, 3, 3};
        const Ending ending = ending_of([&] { group.run(call); });
        ending.check(ErrorKind::mismatch, {"no array was changed"});
        expect(ending.says(to_all ? "sends 3 elements to rank 0" : "counts of a list"),
               ending.text());
        expect(out == before, "an array was changed");
        expect_sound(group);
      }
    });

// Only one pair differs: the counts of the other ranks fit, and so do all frames that they receive.
const ByTransport kSplits(
    "every rank reports splits that do not fit, and no output changes", [](const std::string& by) {
      for (const size_t size : {2, 3, 4})
        run_groups(static_cast<int>(size), by, [&](Group& group) {
          const auto me = static_cast<size_t>(group.rank());
          for (size_t from = 0; from < size; ++from)
            for (size_t to = 0; to < size; ++to) {
              if (from == to) continue;
              Array in(Dtype::int64, 13 * size + 4), out(Dtype::int64, 13 * size);
              const Array before = out;
              Call call{.operation = Operation::all_to_all,
                        .dtype = Dtype::int64,
                        .input = in.data(),
                        .output = out.data(),
                        .counts = std::vector<size_t>(2 * size, 13)};
              if (me == from) call.counts[to] = 17;
              const Ending ending = ending_of([&] { group.run(call); });
              ending.check(ErrorKind::mismatch, {"no array was changed"});
              expect(ending.says("rank " + std::to_string(from) + " (") &&
                         ending.says("sends 17 elements to rank " + std::to_string(to) + " (") &&
                         ending.says("which expects 13;"),
                     ending.text());
              expect(out == before, "an output was changed");
              expect_sound(group);
            }
        });
    });

const ByTransport kEqualSplits("an all_to_all with counts does not fit one without",
                               [](const std::string& by) {
                                 run_groups(3, by, [](Group& group) {
                                   for (int odd = 0; odd < 3; ++odd)
                                     for (const bool given : {false, true}) {
                                       Array in(Dtype::int64, 12), out(Dtype::int64, 12);
                                       const Array before = out;
                                       Call call{.operation = Operation::all_to_all,
                                                 .dtype = Dtype::int64,
                                                 .input = in.data(),
                                                 .output = out.data()};
                                       if ((group.rank() == odd) == given)
                                         call.counts = std::vector<size_t>(6, 4);
                                       else
                                         call.count = 4;
                                       ending_of([&] {
                                         group.run(call);
                                       }).check(ErrorKind::mismatch, {"counts by rank"});
                                       expect(out == before, "an output was changed");
                                       expect_sound(group);
                                     }
                                 });
                               });

const ByTransport kAnyPeer("a message from any rank", [](const std::string& by) {
  run_groups(4, by, [](Group& group) {
    constexpr int kEach = 20;
    Array array(Dtype::int64, 1000);
    if (group.rank() != 0) {
      for (int i = 0; i < kEach; ++i) {
        array.fill([&](size_t j) { return element(group.rank(), j, i); });
        group.run(message(Operation::send, array, 0, 3));
      }
      return group.run({.operation = Operation::barrier});
    }
    std::vector<int> got(4, 0);
    for (int i = 0; i < 3 * kEach; ++i) {
      int source = -7;
      Call call = message(Operation::recv, array, kAnySource, 3);
      call.source = &source;
      if (i % 2 == 0)
        group.run(call);
      else
        group.start(call, {})->wait();
      expect(source > 0 && source < 4, "source " + std::to_string(source));
      Array want(Dtype::int64, 1000);
      const int nth = got[static_cast<size_t>(source)]++;
      want.fill([&](size_t j) { return element(source, j, nth); });
      expect(array == want, "another message, or out of order");
    }
    expect(got == std::vector{0, kEach, kEach, kEach}, "messages by rank");
    group.run({.operation = Operation::barrier});
  });
});

const ByGroups kAnybodyElse(
    "a message from any rank with another count is dropped, and all may leave", 3,
    [](Group& group) {
      Array array(Dtype::int64, 8);
      const auto move = [&](Operation operation, size_t count, int peer) {
        group.run({.operation = operation,
                   .dtype = Dtype::int64,
                   .input = array.data(),
                   .output = array.data(),
                   .count = count,
                   .peer = peer});
      };
      if (group.rank() == 2) return;
      if (group.rank() == 1) return move(Operation::send, 4, 0), move(Operation::send, 8, 0);
      const Array before = array;
      const Ending wrong = ending_of([&] { move(Operation::recv, 5, kAnySource); });
      expect(wrong.is(ErrorKind::mismatch) && wrong.says("rank 1 ") &&
                 wrong.error->fields().peer == 1 && array == before,
             wrong.text());
      move(Operation::recv, 8, kAnySource);
      ending_of([&] {
        move(Operation::recv, 8, kAnySource);
      }).check(ErrorKind::peer_lost, {"left"});
    });

// Large enough that no channel takes a message whole.
constexpr size_t kMuch = (size_t{12} << 20) / kSlowdown + 3;

// One of two messages from a rank to another.
struct Letter {
  Letter(Operation operation, int me, int peer, int nth, size_t count)
      : array(Dtype::uint8, count), nth(nth) {
    call = {.operation = operation,
            .input = array.data(),
            .output = array.data(),
            .count = count,
            .peer = peer};
    if (operation == Operation::send) write(array, me, peer);
  }
  void write(Array& into, int from, int to) const {
    into.fill([&](size_t i) { return element(from * 8 + to, i, nth); });
  }
  bool arrived(int me) const {
    Array want(Dtype::uint8, call.count);
    write(want, call.peer, me);
    return call.operation == Operation::send || array == want;
  }
  Array array;
  int nth;
  Call call;
};

// Two to and from every rank; the second may be as long, short or empty.
std::deque<Letter> letters_of(const Group& group, size_t count) {
  std::deque<Letter> letters;
  const int me = group.rank();
  for (int i = 0; i < group.size(); ++i) {
    const int peer = me % 2 == 0 ? i : group.size() - 1 - i;  // some begin at the other end
    if (peer == me) continue;
    const size_t second = (me + peer) % 3 == 2 ? count : static_cast<size_t>(me + peer) % 3;
    for (const Operation operation : {Operation::send, Operation::recv}) {
      letters.emplace_back(operation, me, peer, 0, count);
      letters.emplace_back(operation, me, peer, 1, second);
    }
  }
  return letters;
}

std::vector<Call> calls_of(const std::deque<Letter>& letters) {
  std::vector<Call> calls;
  for (const Letter& letter : letters) calls.push_back(letter.call);
  return calls;
}

const ByGroups kAtOnce("concurrent messages, larger than the buffers between ranks", 3,
                       [](Group& group) {
                         for (const size_t count : {kMuch, size_t{5}, size_t{70'000}}) {
                           const auto letters = letters_of(group, count);
                           group.exchange(calls_of(letters));
                           for (const Letter& letter : letters)
                             expect(letter.arrived(group.rank()),
                                    "from rank " + std::to_string(letter.call.peer) + ", count " +
                                        std::to_string(count));
                         }
                         group.exchange({});
                         expect_sound(group);
                       });

const ByTransport kSlowOne("... a slow rank does not delay the others", [](const std::string& by) {
  std::latch other_has_it(1);
  run_groups(3, by, [&](Group& group) {
    const int me = group.rank();
    std::deque<Letter> letters;
    if (me == 0)
      for (const int peer : {1, 2}) letters.emplace_back(Operation::send, 0, peer, 0, kMuch);
    else
      letters.emplace_back(Operation::recv, me, 0, 0, kMuch);
    if (me == 1) other_has_it.wait();
    group.exchange(calls_of(letters));
    for (const Letter& letter : letters) expect(letter.arrived(me), "it did not arrive");
    if (me == 2) other_has_it.count_down();
  });
});

const ByGroups kNotAsAsked(
    "... and one with another signature is dropped after the others", 3, [](Group& group) {
      const int me = group.rank();
      auto letters = letters_of(group, 70'000);
      if (me == 1)  // its long one to rank 0 is shorter
        for (Letter& letter : letters)
          if (letter.call.operation == Operation::send && letter.call.peer == 0 && letter.nth == 0)
            letter.call.count = 69'999;
      const Ending ending = ending_of([&] { group.exchange(calls_of(letters)); });
      expect(ending.is(ErrorKind::mismatch) == (me == 0), ending.text());
      expect(me != 0 || (ending.says("rank 1 ") && ending.says("the message is dropped") &&
                         ending.error->fields().peer == 1),
             ending.text());
      for (const Letter& letter : letters) {
        const bool odd = me == 0 && letter.call.peer == 1 && letter.nth == 0;
        expect(odd || letter.arrived(me), "from rank " + std::to_string(letter.call.peer));
      }
      expect_sound(group);
    });

const ByGroups kOneGone("... or ends when one of its ranks has left", 3, [](Group& group) {
  if (group.rank() == 2) return group.close();
  const auto letters = letters_of(group, 70'000);
  const Ending ending = ending_of([&] { group.exchange(calls_of(letters)); });
  expect(ending.is(ErrorKind::peer_lost) || ending.is(ErrorKind::group_broken), ending.text());
  expect(ending.says("rank 2 "), ending.text());
});

const Test kNoExchange("exchange() rejects calls other than messages between two ranks", [] {
  run_groups(2, "local", [](Group& group) {
    Array array(Dtype::uint8, 8);
    for (const Call& call : {Call{.operation = Operation::barrier},
                             Call{.operation = Operation::recv, .peer = kAnySource},
                             Call{.operation = Operation::send, .peer = group.rank()}}) {
      Call given = call;
      given.input = given.output = array.data();
      expect_throws<InvalidArgument>([&] { group.exchange(std::span(&given, 1)); });
    }
    expect_sound(group);
  });
});

const Test kRefuses("invalid counts and roots are rejected", [] {
  run_groups(2, "local", [](Group& group) {
    Array array(Dtype::uint8, 64);
    const auto refused = [&](Call call) {
      call.input = call.output = array.data();
      expect_throws<InvalidArgument>([&] { group.run(call); });
    };
    for (const Operation operation : {Operation::reduce, Operation::gather, Operation::scatter})
      for (const int root : {-1, 2}) refused({.operation = operation, .count = 1, .peer = root});
    refused({.operation = Operation::all_gather, .counts = {1, 2, 3}});
    refused({.operation = Operation::all_gather, .count = 1, .counts = {1, 2}});
    refused({.operation = Operation::all_to_all, .counts = {1, 2}});
    refused({.operation = Operation::all_reduce, .counts = {1, 2}});
    refused({.operation = Operation::all_to_all, .counts = {1, 1, 2, 2}});
    refused({.operation = Operation::all_gather, .counts = {1, SIZE_MAX / 4}});
    expect_throws<Unsupported>([&] {
      group.run({.operation = Operation::all_gather,
                 .input = array.data(),
                 .output = array.data(),
                 .algorithm = Algorithm::tree,
                 .counts = {1, 1}});
    });
    expect_sound(group);
  });
});

}  // namespace
