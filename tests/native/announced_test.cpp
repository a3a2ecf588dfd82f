// Messages between devices on the host side: the sender announces, the receiver answers, and both
// continue or neither does. The transfer between the devices is not tested here.
#include <algorithm>
#include <chrono>
#include <future>
#include <span>
#include <string>
#include <vector>

#include "core/operation.h"
#include "group/group.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace std::chrono_literals;
using ranks::Array;
using ranks::ByGroups;
using ranks::ByTransport;
using ranks::Ending;
using ranks::ending_of;

Call message(Operation operation, int peer, size_t count, uint32_t tag = 0) {
  return {.operation = operation,
          .dtype = Dtype::float32,
          .count = count,
          .peer = peer,
          .tag = tag,
          .algorithm = Algorithm::nccl,
          .device = {.agreement = true}};
}
Call offer(int to, size_t count, uint32_t tag = 0) {
  return message(Operation::send, to, count, tag);
}
Call take(int from, size_t count, uint32_t tag = 0) {
  return message(Operation::recv, from, count, tag);
}

// A later message must succeed after any earlier outcome.
void expect_sound(Group& group) {
  const int rank = group.rank();
  if (rank == 0) group.run(offer(1, 1'000'000, 99));
  if (rank == 1) group.run(take(0, 1'000'000, 99));
  group.run({.operation = Operation::barrier});
}

const ByGroups kAgree("a message is sent when it is received, by tag", 3, [](Group& group) {
  for (int i = 0; i < 20; ++i) {
    const uint64_t before = group.stats().bytes_sent;
    if (group.rank() == 0) {
      group.run(offer(1, 1'000'000, 5));
      group.run(offer(1, 0, 6));
      group.run(take(1, 7));
    } else if (group.rank() == 1) {
      group.run(take(0, 1'000'000, 5));
      group.run(take(0, 0, 6));
      group.run(offer(0, 7));
    }
    expect_equal(group.stats().bytes_sent, before, "nothing but headers is sent");
  }
});

const ByGroups kAnyPeer("a receive from any rank reports the sender", 3, [](Group& group) {
  for (int i = 0; i < 10; ++i) {
    group.run({.operation = Operation::barrier});
    if (group.rank() != 0) {
      group.run(offer(0, 10));
      continue;
    }
    int seen = 0;
    for (int turn = 0; turn < 2; ++turn) {
      int source = -1;
      Call call = take(kAnySource, 10);
      call.source = &source;
      group.run(call);
      seen += source;
    }
    expect_equal(seen, 3, "ranks 1 and 2, one after the other");
  }
});

const ByGroups kUnlike(
    "both ranks report a message of another kind, and the group continues", 2, [](Group& group) {
      Call of_ints = take(0, 8), staged = take(0, 8);
      of_ints.dtype = Dtype::int32;
      staged.algorithm = Algorithm::host_staged;
      for (const Call& other : {take(0, 7), of_ints, staged, take(kAnySource, 9)}) {
        const bool sends = group.rank() == 0;
        const Ending ending = ending_of([&] { group.run(sends ? offer(1, 8) : other); });
        ending.check(ErrorKind::mismatch, {"send(float32, count 8, tag 0, nccl, on CUDA devices)",
                                           "receives ", "no data was sent"});
        expect_equal(ending.error->fields().peer, 1 - group.rank(), "the other rank");
        expect_equal(ending.error->fields().op, std::string(sends ? "send" : "recv"), "the verb");
        expect_sound(group);
      }
    });

const ByGroups kPlaces(
    "device and host messages do not match each other, and each keep their order", 2,
    [](Group& group) {
      Array array(Dtype::float32, 1000);
      Call here =
          message(group.rank() == 0 ? Operation::send : Operation::recv, 1 - group.rank(), 1000);
      here.algorithm = Algorithm::automatic;
      here.device.agreement = false;
      here.input = here.output = array.data();
      for (int i = 0; i < 5; ++i) {
        const auto value = [&](size_t j) { return ranks::element(i, j); };
        Array wanted(Dtype::float32, 1000);
        wanted.fill(value);
        if (group.rank() == 0) {
          array = wanted;
          here.input = array.data();
          group.run(here);
          group.run(offer(1, 1000));
          ending_of([&] {
            group.run(offer(1, 1000));
          }).check(ErrorKind::mismatch, {"receives recv(float32"});
          group.run(here);
          group.run(here);
        } else {
          array = Array(Dtype::float32, 1000);
          here.output = array.data();
          group.run(here);
          expect(array == wanted, "the first came first");
          group.run(take(0, 1000));
          const Array before = array;
          expect(ending_of([&] { group.run(here); }).is(ErrorKind::mismatch), "announced");
          expect(array == before, "nothing has moved");
          expect(ending_of([&] { group.run(take(0, 1000)); }).is(ErrorKind::mismatch), "moved");
          group.run(here);
          expect(array == wanted, "the last, after all that");
        }
        expect_sound(group);
      }
    });

const ByGroups kBothSend("two ranks that both send first fail at once, and continue", 2,
                         [](Group& group) {
                           for (int i = 0; i < 20; ++i) {
                             const int peer = 1 - group.rank();
                             const auto tag =
                                 static_cast<uint32_t>(group.rank());  // whatever the tags
                             ending_of([&] { group.run(offer(peer, 8, tag)); })
                                 .check(ErrorKind::mismatch, {"each waits for the other to receive",
                                                              "rank 0 ", "rank 1 "});
                             expect_sound(group);
                           }
                         });

// The last of `size` ranks leaves, or makes no call until that of rank 0 has failed. `body`: what
// the others do, with the limit of the call; 0: the default.
void expect_lost(const std::string& by, int size,
                 void (*body)(Group&, std::chrono::nanoseconds limit)) {
  for (const bool leaves : {false, true}) {
    std::promise<void> over;
    ranks::World world{.size = size, .transport = by};
    ranks::run_groups(world, [&](Group& group) {
      if (group.rank() == size - 1) {
        if (leaves) return group.close();
        return over.get_future().wait();
      }
      if (group.rank() > 0) return body(group, 0ns);
      const Ending ending = ending_of([&] { body(group, leaves ? 0ns : 100ms); });
      over.set_value();
      expect(ending.is(leaves ? ErrorKind::peer_lost : ErrorKind::timeout), ending.text());
      expect(ending.says("send: ") && ending.says("rank " + std::to_string(size - 1)),
             ending.text());
    });
  }
}

const ByTransport kNoRank("waiting for an answer ends at the limit, or when the rank leaves",
                          [](const std::string& by) {
                            expect_lost(by, 2, [](Group& group, auto limit) {
                              Call call = offer(1, 8);
                              call.timeout = limit;
                              group.run(call);
                            });
                          });

using Tags = std::vector<uint32_t>;

// The tags of the agreed messages of one direction, in order.
Tags tags_of(const AgreedCalls& found, Operation operation) {
  Tags tags;
  for (const Call& call : found.agreed)
    if (call.operation == operation) tags.push_back(call.tag);
  return tags;
}

AgreedCalls agree(Group& group, const std::vector<Call>& calls) { return group.exchange(calls); }

const ByGroups kBatch(
    "several messages at once are agreed about in the same order by both ranks", 2,
    [](Group& group) {
      const bool first = group.rank() == 0;
      for (int i = 0; i < 50; ++i) {
        const auto found =
            first ? agree(group, {offer(1, 5, 1), take(1, 7, 3), offer(1, 6, 2), offer(1, 4, 1)})
                  : agree(group, {take(0, 6, 2), take(0, 5, 1), take(0, 4, 1), offer(0, 7, 3)});
        expect(!found.mismatch && found.agreed.size() == 4, "all are agreed");
        Tags mine = tags_of(found, first ? Operation::send : Operation::recv);  // to rank 1
        for (const uint32_t tag : tags_of(found, first ? Operation::recv : Operation::send))
          mine.push_back(tag);
        Tags all(2 * mine.size());
        group.run({.operation = Operation::all_gather,
                   .input = mine.data(),
                   .output = all.data(),
                   .count = mine.size() * sizeof(uint32_t)});
        expect(std::ranges::equal(std::span(all).first(4), std::span(all).last(4)),
               "the same order");
      }
      expect_sound(group);
    });

const ByGroups kBatchAndSingle(
    "several messages at once meet single calls in another order", 2, [](Group& group) {
      for (int i = 0; i < 50; ++i) {
        if (group.rank() == 1) {
          group.run(offer(0, 7, 3));  // while rank 0 announces as well
          for (const uint32_t tag : {4U, 2U, 1U}) group.run(take(0, 5, tag));
        } else {
          const auto found =
              agree(group, {offer(1, 5, 1), offer(1, 5, 2), offer(1, 5, 4), take(1, 7, 3)});
          expect(!found.mismatch, "all are agreed");
          expect(tags_of(found, Operation::send) == Tags{4, 2, 1}, "the order of the receiver");
        }
      }
      expect_sound(group);
    });

const ByGroups kRing("a ring of several messages at once does not deadlock", 4, [](Group& group) {
  const int right = (group.rank() + 1) % 4, left = (group.rank() + 3) % 4;
  for (int i = 0; i < 20; ++i) {
    const auto found = agree(group, {offer(right, 8), take(left, 8)});
    expect_equal(found.agreed.size(), size_t{2}, "agreed");
  }
  expect_sound(group);
});

const ByGroups kBatchUnlike(
    "one of several messages is of another kind: the others are agreed", 3, [](Group& group) {
      const int rank = group.rank();
      for (int i = 0; i < 10; ++i) {
        AgreedCalls found;
        if (rank == 0) found = agree(group, {offer(1, 5, 1), offer(1, 6, 2), offer(2, 6, 2)});
        if (rank == 1) found = agree(group, {take(0, 9, 2), take(0, 5, 1)});
        if (rank == 2) found = agree(group, {take(0, 6, 2)});
        expect(found.mismatch.has_value() == (rank < 2), "only the two ranks of that message");
        expect_equal(found.agreed.size(), rank == 0 ? size_t{2} : size_t{1}, "agreed");
        if (found.mismatch) {
          const std::string text = found.mismatch->what();
          expect(found.mismatch->kind() == ErrorKind::mismatch, text);
          expect_says(text, "send(float32, count 6, tag 2");
          expect_says(text, "recv(float32, count 9, tag 2");
        }
        expect_sound(group);
      }
    });

const ByTransport kBatchLost("several messages at once fail when one rank leaves, or at the limit",
                             [](const std::string& by) {
                               expect_lost(by, 3, [](Group& group, auto limit) {
                                 if (group.rank() == 1) return (void)agree(group, {take(0, 8)});
                                 std::vector calls{offer(1, 8), offer(2, 8)};
                                 calls[0].timeout = limit;
                                 (void)agree(group, calls);
                               });
                             });

}  // namespace
