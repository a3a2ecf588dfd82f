// Calls on arrays in heaps: zero-copy calls, calls with some private arrays, disagreements, and the
// heap itself.
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/plan.h"
#include "core/errors.h"
#include "engine/engine.h"
#include "group/group.h"
#include "harness.h"
#include "os/shared_heap.h"
#include "ranks.h"
#include "shared/shared_call.h"

using namespace pycomm;
using namespace pycomm::group;
using namespace pycomm::os;
using namespace ranks;
using namespace std::chrono_literals;

namespace {

// Elements of float32 above the size from which arrays are offered; several steps of 256 KiB.
const std::vector<size_t> kCounts{4097, 65'537, 400'003};
constexpr size_t kMargin = 1000;  // elements, before and behind what a call may touch

// Floats in the heap or not, from an odd element on, with a margin that must stay as it is.
class Floats {
 public:
  Floats(size_t count, bool in_heap) : count_(count), own_(in_heap ? 0 : count + 2 * kMargin) {
    if (in_heap) memory_ = SharedHeap::own()->allocate((count + 2 * kMargin) * sizeof(float));
    at_ = in_heap ? reinterpret_cast<float*>(memory_.get()) : own_.data();
    std::fill(at_, at_ + count + 2 * kMargin, -7.0F);
  }
  float* data() { return at_ + kMargin; }
  void fill(int rank) {
    for (size_t i = 0; i < count_; ++i) data()[i] = value(rank, i);
  }
  static float value(int rank, size_t i) { return static_cast<float>((i % 97 + 1) * (rank + 1)); }
  // Checks for the sums of `size` ranks, or the values of `rank`.
  void expect_sums(int size) { expect_scaled(static_cast<float>(size * (size + 1) / 2)); }
  void expect_own(int rank) { expect_scaled(static_cast<float>(rank + 1)); }
  void expect_margin() {
    for (size_t i = 0; i < kMargin; ++i)
      expect(at_[i] == -7.0F && at_[kMargin + count_ + i] == -7.0F, "the margin has changed");
  }

 private:
  void expect_scaled(float factor) {
    for (size_t i = 0; i < count_; ++i) expect_equal(data()[i], value(0, i) * factor, "an element");
    expect_margin();
  }

  size_t count_;
  std::vector<float> own_;
  std::shared_ptr<std::byte> memory_;
  float* at_;
};

Call sum_of(Floats& input, Floats& output, size_t count) {
  return {.operation = Operation::all_reduce,
          .dtype = Dtype::float32,
          .input = input.data(),
          .output = output.data(),
          .count = count};
}

// Bytes that this rank writes into others' memory in a zero-copy call.
uint64_t mapped_bytes(const Group& group, size_t count) {
  const auto own =
      collectives::piece(collectives::Space::output, count, group.size(), group.rank());
  return static_cast<size_t>(group.size() - 1) * own.count * sizeof(float);
}

// Mappings of this process that are as large as a heap.
int heaps_mapped() {
  int found = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    expect_equal(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end), 2, "a line of maps");
    found += end - begin == SharedHeap::capacity() ? 1 : 0;
  }
  return found;
}

// The first test, and without a full mesh first: no other group has mapped a heap before.
const Test kDemand("ranks that connect on demand map no heaps", [] {
  for (const int full_mesh : {0, 2}) {
    const int before = std::exchange(ranks::full_mesh, full_mesh);
    run_groups(2, "shm", [&](Group& group) {
      std::vector<float> x(10);
      const Call sum = sum_in_place(x);
      group.run(sum);  // all have met
      expect_equal(heaps_mapped() > 0, full_mesh > 0, "whether heaps are mapped");
      group.run(sum);
    });
    ranks::full_mesh = before;
  }
});

const Test kSums("arrays in heaps are summed in place", [] {
  for (const std::string& by : kShared)
    for (const int size : {2, 3, 4})
      run_groups(size, by, [](Group& group) {
        for (const size_t count : kCounts)
          for (const bool in_place : {true, false}) {
            Floats input(count, true), output(count, true);
            Floats& into = in_place ? input : output;
            input.fill(group.rank());
            const uint64_t before = group.stats().bytes_sent;
            group.run(sum_of(input, into, count));
            into.expect_sums(group.size());
            if (!in_place) input.expect_own(group.rank());
            expect_equal(group.stats().bytes_sent - before, mapped_bytes(group, count),
                         "bytes that went");
          }
      });
});

// A call whose arrays are in heaps where required, except those of rank `odd`; with the smaller
// array inside the larger one, if `in_place`.
struct Scene {
  Operation operation;
  size_t count;
  int odd;
  bool in_place;
};

// Bytes that tell the two paths apart: sent by the rank that gives to all, received in a broadcast.
uint64_t moved(const Group& group, Operation operation) {
  const Stats stats = group.stats();
  return operation == Operation::broadcast ? stats.bytes_received : stats.bytes_sent;
}

void play(Group& group, const Scene& scene) {
  const auto size = static_cast<size_t>(group.size()), rank = static_cast<size_t>(group.rank());
  const bool gives_rows = scene.operation == Operation::reduce_scatter;
  const bool in_heap = group.rank() != scene.odd;
  Floats small(scene.count, in_heap && !gives_rows);
  Floats large(scene.count * size, in_heap && (gives_rows || scene.in_place));
  float* own = scene.in_place ? large.data() + rank * scene.count : small.data();
  Call call{.operation = scene.operation, .dtype = Dtype::float32, .count = scene.count};
  if (scene.operation == Operation::broadcast) call.peer = group.size() - 1;
  call.input = gives_rows ? large.data() : own;
  call.output = scene.operation == Operation::all_gather ? large.data() : own;
  if (gives_rows) large.fill(group.rank());
  for (size_t i = 0; i < scene.count && !gives_rows; ++i) own[i] = Floats::value(group.rank(), i);
  const uint64_t before = moved(group, scene.operation);
  group.run(call);
  const float all = static_cast<float>(size * (size + 1) / 2);
  for (size_t i = 0; i < scene.count; ++i) {
    if (gives_rows)
      expect_equal(own[i], Floats::value(0, rank * scene.count + i) * all, "a sum");
    else if (scene.operation == Operation::broadcast)
      expect_equal(own[i], Floats::value(group.size() - 1, i), "an element of the root's");
    for (size_t peer = 0; peer < size && scene.operation == Operation::all_gather; ++peer)
      expect_equal(large.data()[peer * scene.count + i], Floats::value(static_cast<int>(peer), i),
                   "an element of a row");
  }
  small.expect_margin();
  large.expect_margin();
  if (scene.odd >= 0) return;
  const bool is_root = scene.operation == Operation::broadcast && rank + 1 == size;
  const uint64_t expected = scene.operation != Operation::broadcast || is_root
                                ? 0
                                : mapped_bytes(group, scene.count) / (size - 1);
  expect_equal(moved(group, scene.operation) - before, expected, "bytes that went");
}

const Test kVerbs("the other verbs use arrays in heaps in place, or all ranks use slots", [] {
  for (const std::string& by : kShared)
    for (const int size : {2, 3})
      run_groups(size, by, [](Group& group) {
        for (const Operation operation :
             {Operation::broadcast, Operation::all_gather, Operation::reduce_scatter})
          for (const size_t count : {size_t{4097}, size_t{100'003}})
            for (int odd = -1; odd < group.size(); ++odd)
              for (const bool in_place : {true, false})
                play(group, {operation, count, odd, in_place});
      });
});

// The rank with a private array, and which of its two arrays.
const Test kMixed("with one private array all ranks use slots", [] {
  for (const std::string& by : kShared)
    run_groups(3, by, [](Group& group) {
      for (const size_t count : kCounts)
        for (int odd = 0; odd < 3; ++odd)
          for (const bool whole : {true, false}) {
            const bool here = group.rank() == odd;
            Floats input(count, !(here && whole)), output(count, !here);
            input.fill(group.rank());
            group.run(sum_of(input, output, count));
            output.expect_sums(group.size());
            input.expect_own(group.rank());
            group.run(sum_of(input, input, count));  // mapped again, unless `whole`
            input.expect_sums(group.size());
          }
    });
});

const Test kHalf("16-bit sums in heaps are rounded once", [] {
  run_groups(3, "local", [](Group& group) {
    const uint16_t big = 0x6800, one = 0x3c00, truth = 0x6801;  // 2048, 1, 2050
    constexpr size_t kCount = 30'000;
    const auto memory = SharedHeap::own()->allocate(kCount * sizeof(uint16_t));
    auto* x = reinterpret_cast<uint16_t*>(memory.get());
    std::fill(x, x + kCount, group.rank() == 0 ? big : one);
    group.run({.operation = Operation::all_reduce,
               .dtype = Dtype::float16,
               .input = x,
               .output = x,
               .count = kCount});
    for (size_t i = 0; i < kCount; ++i) expect_equal(x[i], truth, "a sum rounded once");
  });
});

// A sum in a separate array, which is freed right after the call.
void sum_once(Group& group, size_t count) {
  Floats x(count, true);
  x.fill(group.rank());
  group.run(sum_of(x, x, count));
  x.expect_sums(group.size());
}

const Test kDisagreement("a disagreement about arrays in heaps changes none", [] {
  for (const std::string& by : kShared)
    run_groups(3, by, [](Group& group) {
      constexpr size_t kCount = 100'000;
      for (int odd = 0; odd < 3; ++odd)
        for (const auto& [other, private_too] :
             {std::pair{size_t{100'001}, false}, {size_t{10}, true}, {size_t{100'001}, true}}) {
          const bool here = group.rank() == odd;
          Floats x(kCount + 1, !(here && private_too));
          x.fill(group.rank());
          const auto ending = ending_of([&] { group.run(sum_of(x, x, here ? other : kCount)); });
          expect(ending.is(ErrorKind::mismatch), "not a mismatch: " + ending.text());
          x.expect_own(group.rank());
          sum_once(group, kCount);
        }
    });
});

// An array is freed as soon as this rank's call is over; its reused memory is not touched.
const Test kLifetime("arrays that are freed right after their call", [] {
  run_groups(2, "shm", [](Group& group) {
    for (int i = 0; i < 200; ++i) sum_once(group, 50'000);
  });
});

// Two ranks on one thread, so that the test controls the order of their steps: rank 0 aborts after
// a given number of rank 1's steps. By then it has made its offer, or met rank 1 too, or done all
// its work.
enum class Gone { offered, met, worked };
void left_test(int steps_before, Gone gone_has) {
  constexpr size_t kCount = 400'000;
  std::vector<std::shared_ptr<shared::Segment>> segments;
  for (int rank = 0; rank < 2; ++rank) {
    const auto memory = transport::local_memory("left", rank, sizeof(shared::Segment));
    segments.emplace_back(memory, reinterpret_cast<shared::Segment*>(memory.get()));
  }
  struct Rank {
    Rank(int rank, const std::vector<std::shared_ptr<shared::Segment>>& segments)
        : engine(std::vector<std::unique_ptr<transport::Channel>>(2),
                 {.rank = rank, .names = {}, .interrupted = {}}),
          region(segments, {0, 1}, rank) {
      x.fill(rank);
      region.set_heaps({SharedHeap::own()->view(), SharedHeap::own()->view()});
      job.input = job.output = reinterpret_cast<std::byte*>(x.data());
      region.begin(job.header);
      run.emplace(engine, region, job);
    }
    Floats x{kCount, true};
    engine::Engine engine;
    shared::SharedMemoryRegion region;
    engine::Job job{.element_bytes = sizeof(float),
                    .reducer = &kernels::reducer(Dtype::float32, ReduceOp::sum),
                    .operation = Operation::all_reduce,
                    .count = kCount};
    std::optional<shared::SharedCall> run;
  } gone(0, segments), late(1, segments);
  expect(gone.run->advance() && late.run->advance(), "no offer");
  if (gone_has != Gone::offered) expect(gone.run->advance(), "has not met the other");
  expect(late.run->advance(), "has not met the other");
  for (int i = 0; i < steps_before; ++i) expect(late.run->advance(), "a step");
  while (gone_has == Gone::worked && gone.run->advance()) {
  }
  gone.run.reset();
  if (gone_has != Gone::worked) gone.x.fill(0);
  for (int i = 0; i < 10; ++i) expect(!late.run->advance(), "continues without the other");
  expect(!late.run->done(), "takes the other's leftover for a result");
  expect_equal(late.run->receiving_from(), 0, "the rank that it waits for");
  if (gone_has != Gone::worked) gone.x.expect_own(0);
}
const Test kLeft("nothing is written into the array of a rank that aborted", [] {
  left_test(1, Gone::met);
  left_test(0, Gone::offered);
});

// 800 kB in steps of 256 KiB: the last one was under way, and may have read anything.
const Test kLeftLast("a rank that aborts in the others' last step is not taken for a finished one",
                     [] { left_test(4, Gone::worked); });

const Test kLost("a rank that never joined the call has changed nothing", [] {
  World world{.size = 3, .transport = "shm"};
  run(3, [&](int rank) {
    auto group = world.join(rank);
    Floats x(100'000, true);
    x.fill(rank);
    if (rank == 1) return group.reset();
    ending_of([&] { group->run(sum_of(x, x, 100'000)); }).check(ErrorKind::peer_lost, {"rank 1"});
    x.expect_own(rank);
  });
});

const Test kHeap("the heap gives, takes back and joins", [] {
  const size_t page = page_bytes();
  auto heap = SharedHeap::own();
  expect(heap == SharedHeap::own(), "a process has one heap");
  auto a = heap->allocate(1), b = heap->allocate(page + 1), c = heap->allocate(3 * page);
  expect(b.get() == a.get() + page && c.get() == b.get() + 2 * page, "one behind another");
  const std::byte* gap = b.get();
  std::memset(b.get(), 1, 2 * page);
  b.reset();
  auto d = heap->allocate(2 * page);
  expect(d.get() == gap && d.get()[5] == std::byte{0}, "a gap is used again, and is empty");
  a.reset();
  d.reset();
  auto e = heap->allocate(3 * page);
  expect(e.get() == gap - page, "gaps that touch are one");
  expect(
      ending_of([&] { (void)heap->allocate(heap->view().bytes); }).is(ErrorKind::invalid_argument),
      "more than there is");
  expect(ending_of([&] { (void)heap->allocate(SIZE_MAX); }).is(ErrorKind::invalid_argument),
         "more than can be counted");
  e.reset();
  c.reset();
  auto all = heap->allocate(heap->view().bytes);
  expect_equal(heap->view().offset_of(all.get(), 1).value(), uint64_t{0}, "all is free again");
});

const Test kView("a heap as seen by other ranks", [] {
  const auto heap = SharedHeap::own();
  const HeapView& view = heap->view();
  const std::byte* end = view.base.get() + view.bytes;
  expect(view.offset_of(end - 8, 8).has_value() && !view.offset_of(end - 8, 9).has_value(),
         "the end of the heap");
  expect(!view.offset_of(view.base.get() - 1, 1).has_value(), "before the heap");
  expect(
      !view.holds(view.bytes + 1, 0) && !view.holds(~uint64_t{0}, 1) && view.holds(0, view.bytes),
      "offsets from outside");
  expect(!HeapView{}.offset_of(end, 1).has_value(), "no heap");
  const auto again = map_heap(heap->descriptor(), view.bytes);
  expect(map_heap(heap->descriptor(), view.bytes).base == again.base, "mapped once");
  const auto memory = heap->allocate(page_bytes());
  memory.get()[7] = std::byte{9};
  expect(again.base.get()[*view.offset_of(memory.get(), 8) + 7] == std::byte{9}, "the same memory");
});

}  // namespace
