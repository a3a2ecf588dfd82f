// The connections of a large group, 70 ranks that connect on demand: those of the plans that have
// run and no other, a few more descriptors, and none after its end.
#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;

constexpr int kSize = 70;
constexpr size_t kCount = 1000;

using Pairs = std::set<std::pair<int, int>>;  // lower rank, higher

// The pairs of ranks that a plan connects.
void add_pairs(Pairs& pairs, Algorithm algorithm, Operation operation, size_t count) {
  for (int rank = 0; rank < kSize; ++rank)
    for (const collectives::Move& move :
         collectives::make_plan(algorithm, operation, {.rank = rank, .size = kSize, .count = count})
             .moves)
      for (const int peer : {move.to, move.from})
        if (peer != collectives::kNoRank && peer != rank) pairs.insert(std::minmax(rank, peer));
}

long sockets() {
  long count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const auto target = std::filesystem::read_symlink(entry.path(), closed);
    count += !closed && target.string().starts_with("socket:");
  }
  return count;
}

// A connection that was dropped for the peer's closes a moment after the last rank is done, and a
// closed tcp connection when the peer has all of it.
long settled(long wanted, long (*count)()) {
  const Deadline deadline(10s * ranks::kSlowdown);
  while (count() != wanted && !deadline.expired()) std::this_thread::yield();
  return count();
}

// Runs `look` on rank 0 while all ranks are between two barriers.
void all_stand(group::Group& group, const std::function<void()>& look) {
  group.run({.operation = Operation::barrier});
  if (group.rank() == 0) look();
  group.run({.operation = Operation::barrier});
}

void expect_sum(group::Group& group, Algorithm algorithm) {
  std::vector<float> in(kCount, static_cast<float>(group.rank())), out(kCount);
  group.run({.operation = Operation::all_reduce,
             .dtype = Dtype::float32,
             .input = in.data(),
             .output = out.data(),
             .count = kCount,
             .algorithm = algorithm});
  expect(std::ranges::count(out, kSize * (kSize - 1) / 2.0F) == kCount, "the sum");
}

// `listeners`: listening sockets of a rank.
void expect_little(const std::string& transport, long listeners) {
  const long before = ranks::descriptors(), sockets_before = sockets();
  Pairs pairs;
  ranks::World world{.size = kSize, .transport = transport, .timeout = 60s * ranks::kSlowdown};
  ranks::run_groups(world, [&](group::Group& group) {
    long others = 0;
    const auto look = [&](const std::string& when) {
      const long wanted = sockets_before + kSize * listeners + 2 * static_cast<long>(pairs.size());
      expect_equal(settled(wanted, sockets), wanted, "sockets " + when);
      const long now = ranks::descriptors() - before - (sockets() - sockets_before);
      if (others == 0) others = now;
      expect(now <= 4L * kSize, std::to_string(now) + " other descriptors " + when);
      expect_equal(now, others, "other descriptors " + when);
    };
    all_stand(group, [&] {
      const Algorithm barrier =
          collectives::choose({.operation = Operation::barrier, .size = kSize});
      add_pairs(pairs, barrier, Operation::barrier, 0);
      look("of the barrier");
    });
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::halving}) {
      expect_sum(group, algorithm);
      all_stand(group, [&] {
        add_pairs(pairs, algorithm, Operation::all_reduce, kCount);
        look("behind algorithm " + std::to_string(static_cast<int>(algorithm)));
      });
    }
    expect(pairs.size() < size_t{kSize} * (kSize - 1) / 4, "pairs of the plans");
  });
  expect_equal(settled(before, ranks::descriptors), before, "descriptors at the end");
}

const Test kLocal("local: a large group opens what its plans need",
                  [] { expect_little("local", 0); });
const Test kTcp("tcp: a large group opens what its plans need", [] { expect_little("tcp", 1); });

}  // namespace
