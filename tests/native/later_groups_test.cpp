// Later groups, whose ranks exchange their infos through the shared memory of their parent group.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "group/group.h"
#include "harness.h"
#include "ranks.h"
#include "rendezvous/local_store.h"

using namespace pycomm;
using namespace pycomm::group;
using namespace std::chrono_literals;

namespace {

// A store that counts the keys that ranks set.
class Counted final : public rendezvous::Store {
 public:
  void set(const std::string& key, const std::string& value, const Deadline& deadline) override {
    ++keys;
    inner_.set(key, value, deadline);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return inner_.get(key, deadline);
  }
  int64_t add(const std::string& key, int64_t amount, const Deadline& deadline) override {
    return inner_.add(key, amount, deadline);
  }
  std::optional<std::string> remove(const std::string& key, const Deadline& deadline) override {
    return inner_.remove(key, deadline);
  }
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline) override {
    return inner_.claim(key, value, deadline);
  }
  std::atomic<int> keys{0};

 private:
  rendezvous::LocalStore inner_;
};

ConnectOptions part_of(const std::string& name, int rank, int size,
                       const std::string& transport = {}) {
  ConnectOptions options;
  options.rank = rank;
  options.size = size;
  options.name = name;
  options.timeout = 30s;
  options.transport = transport;
  options.address = "127.0.0.1";
  return options;
}

void check_sum(Group& part) {
  std::vector<float> ones(5, 1);
  part.run(ranks::sum_in_place(ones));
  expect_equal(ones[4], static_cast<float>(part.size()), "the sum of part " + part.info().name);
}

// A rank that comes more than 100 ms late may find the others' infos in the store, too. A rank that
// is not woken looks again after 100 ms.
void check_exchanges(const std::string& transport) {
  Counted store;
  int quick = 0, without_keys = 0;
  ranks::run_groups(3, transport, [&](Group& parent) {
    for (int i = 0; i < 20; ++i) {
      const int before = store.keys;
      parent.run({.operation = Operation::barrier});
      const auto begin = Clock::now();
      const auto part = parent.connect_part(store, part_of("part", parent.rank(), 3, transport));
      const auto passed = Clock::now() - begin;
      check_sum(*part);
      if (parent.rank() == 0) {
        quick += passed < kPollInterval ? 1 : 0;
        without_keys += store.keys == before ? 1 : 0;
      }
      parent.run({.operation = Operation::barrier});
    }
  });
  expect(quick > 0, "no group formed within 100 ms");
  const std::string text = std::to_string(without_keys) + " of 20 groups set no key";
  expect(transport == "tcp" ? without_keys == 0 : without_keys > 0, text);
}

const ranks::ByTransport kOnce("a later group of one host sets no key of the store",
                               &check_exchanges);

// A rank has places for the infos of eight groups; those of others are in the store. Each rank
// forms the groups in another order.
const Test kMany("more later groups than places form at once", [] {
  rendezvous::LocalStore store;
  constexpr int kParts = 12;
  ranks::World world{.size = 3, .transport = "shm", .thread_multiple = true};
  ranks::run_groups(world, [&](Group& parent) {
    std::vector<std::shared_ptr<Group>> parts(kParts);
    std::vector<std::thread> threads;
    for (int i = 0; i < kParts; ++i)
      threads.emplace_back([&, at = (i + 5 * parent.rank()) % kParts] {
        parts[static_cast<size_t>(at)] = parent.connect_part(
            store, part_of("part " + std::to_string(at), parent.rank(), parent.size()));
      });
    for (std::thread& thread : threads) thread.join();
    for (const auto& part : parts) check_sum(*part);
  });
});

// Also one whose name is too long for a place.
const Test kSome("some ranks of the parent form a group under any name, again and again", [] {
  rendezvous::LocalStore store;
  ranks::run_groups(4, "shm", [&](Group& parent) {
    if (parent.rank() == 1) return;
    const int rank = std::max(0, parent.rank() - 1);
    for (const std::string& name : {std::string("part"), std::string(3000, 'x')})
      for (int i = 0; i < 3; ++i) {
        const auto part = parent.connect_part(store, part_of(name, 2 - rank, 3));
        expect_equal(part->rank(), 2 - rank, "its rank");
        check_sum(*part);
      }
  });
});

const Test kMissing("all ranks name the one that is missing, and the next attempt forms", [] {
  rendezvous::LocalStore store;
  ranks::run_groups(3, "shm", [&](Group& parent) {
    ConnectOptions options = part_of("part", parent.rank(), 3);
    if (parent.rank() != 2) {
      options.timeout = 500ms;
      ranks::ending_of([&] {
        (void)parent.connect_part(store, options);
      }).check(ErrorKind::timeout, {"\"part\" did not form in 0.5 s", "did not join: 2"}, 2);
      options.timeout = 30s;
    }
    parent.run({.operation = Operation::barrier});
    check_sum(*parent.connect_part(store, options));
  });
});

const Test kBroken("the ranks that are left form a later group after the parent broke", [] {
  rendezvous::LocalStore store;
  ranks::run_groups(3, "shm", [&](Group& parent) {
    parent.abort("a test");
    if (parent.rank() == 1) return;
    check_sum(*parent.connect_part(store, part_of("part", parent.rank() / 2, 2)));
  });
});

const Test kOptions("ranks with other options are refused on all ranks", [] {
  rendezvous::LocalStore store;
  ranks::run_groups(2, "shm", [&](Group& parent) {
    ConnectOptions options = part_of("part", parent.rank(), 2);
    options.reproducible = parent.rank() == 1;
    ranks::ending_of([&] {
      (void)parent.connect_part(store, options);
    }).check(ErrorKind::mismatch, {"reproducible=True"});
  });
});

}  // namespace
