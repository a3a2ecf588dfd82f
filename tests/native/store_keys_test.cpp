// The stores: counters, removed keys, a closed listener, and groups that form again and again in
// one store under one name.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "group/connect.h"
#include "harness.h"
#include "rendezvous/server_connections.h"
#include "rendezvous/store_frame.h"
#include "rendezvous/store_server.h"
#include "stores.h"

using namespace pycomm;
using namespace pycomm::group;
using namespace pycomm::rendezvous;

namespace {

const Test kAdd("store: every addition counts once, from every end", [] {
  with_each_store([](Store& here, Store& there) {
    expect_equal(here.add("sum", 5), 5, "a new key begins at 0");
    expect_equal(there.add("sum", -7), -2, "there");
    expect_equal(here.get("sum", within(10s)), "-2", "as text");
    std::vector<std::future<std::vector<int64_t>>> adders;
    for (int i = 0; i < 4; ++i)
      adders.push_back(std::async(std::launch::async, [&, i] {
        std::vector<int64_t> sums;
        for (int j = 0; j < 50; ++j) sums.push_back((i % 2 == 0 ? here : there).add("count", 1));
        return sums;
      }));
    std::set<int64_t> all;
    for (auto& adder : adders)
      for (const int64_t sum : adder.get()) all.insert(sum);
    expect_equal(all.size(), size_t{200}, "different sums");
    expect_equal(*all.rbegin(), 200, "the last");
  });
});

const Test kAddWrong("store: add() rejects a value that is no 64-bit number", [] {
  with_each_store([](Store& here, Store& there) {
    here.set("word", "12x");
    here.set("most", "9223372036854775807");
    for (Store* store : {&here, &there}) {
      expect_says(expect_throws<InvalidArgument>([&] { store->add("word", 1); }), "'word'");
      expect_throws<InvalidArgument>([&] { store->add("most", 1); });
    }
    expect_equal(there.get("word", within(10s)), "12x", "unchanged");
    expect_equal(there.add("most", -1), INT64_MAX - 1, "still in range");
  });
});

const Test kRemove("store: remove() gives the value to one caller only", [] {
  with_each_store([](Store& here, Store& there) {
    expect(!there.remove("key").has_value(), "nothing is there");
    here.set("key", "value");
    expect(there.remove("key") == "value", "what was there");
    expect(!here.remove("key").has_value(), "it is gone");
    expect_throws<Timeout>([&] { here.get("key", within(10ms)); });
    std::atomic<int> taken{0};
    for (int round = 0; round < 20; ++round) {
      here.set("prize", "");
      std::vector<std::thread> takers;
      for (Store* store : {&here, &there, &here, &there})
        takers.emplace_back([&, store] {
          if (store->remove("prize")) ++taken;
        });
      for (auto& taker : takers) taker.join();
    }
    expect_equal(taken.load(), 20, "20 values, each removed once");
  });
});

const Test kClaim("store: all callers that claim a key get the first one's value", [] {
  with_each_store([](Store& here, Store& there) {
    here.set("taken", "before");
    expect(there.claim("taken", "mine") == "before", "an existing value stays");
    for (int round = 0; round < 20; ++round) {
      const std::string key = "round " + std::to_string(round);
      std::array<std::string, 4> given;
      std::vector<std::thread> claimers;
      for (size_t i = 0; i < given.size(); ++i)
        claimers.emplace_back(
            [&, i] { given[i] = (i % 2 == 0 ? here : there).claim(key, std::to_string(i)); });
      for (auto& claimer : claimers) claimer.join();
      for (const std::string& one : given) expect(one == given[0], "all get the same value");
      expect(here.get(key, within(1s)) == given[0], "and it is stored");
    }
  });
  LocalStore full;
  expect(!full.claim_within("n", "123456", 6).has_value(), "the store is full");
});

const Test kRoom("local store: a removal frees space, an addition uses it", [] {
  LocalStore store;
  expect(store.add_within("n", 12345, 6).has_value(), "6 bytes fit");
  expect(!store.add_within("n", 900'000, 6).has_value(), "one more does not fit");
  expect(store.remove("n") == "12345", "the sum is as it was");
  expect(store.set_within("key", "123", 6), "the space is free again");
});

const Test kSettled(
    "tcp store: after all ranks connected the public port is closed, and present clients continue",
    [] {
      const auto server = TcpStore::serve(kHost, 0, kKey);
      const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
      const auto other = TcpStore::connect(kHost, server->port(), kKey, within(10s));
      const int before = open_descriptors();
      for (Store* store : {static_cast<Store*>(client.get()), static_cast<Store*>(server.get()),
                           static_cast<Store*>(server.get())})
        store->all_ranks_connected();
      expect_equal(open_descriptors(), before - 1, "descriptors without the public listener");
      expect_says(expect_throws<Timeout>(
                      [&] { TcpStore::connect(kHost, server->port(), kKey, within(100ms)); }),
                  "Connection refused");
      // One connection, two threads: a waiting get does not delay a set.
      auto got = std::async(std::launch::async, [&] { return client->get("later", within(20s)); });
      expect_throws<Timeout>([&] { client->get("nothing", within(150ms)); });
      client->set("later", "come");
      expect_equal(got.get(), "come", "to the thread that waited");
      expect_equal(other->add("count", 1), 1, "the other client");
      // Its port is free for the next run while these connections are open.
      const auto next = TcpStore::serve(kHost, server->port(), kKey);
      expect_equal(client->add("count", 1), 2, "beside the next run");
    });

// Without an order, a get that repeats its request takes the only connection back each time before
// the call that waits for it wakes.
const Test kOrder("tcp store: calls that share a connection take it in the order of their arrival",
                  [] {
                    const auto server = TcpStore::serve(kHost, 0, kKey);
                    std::atomic<bool> asked{false}, returned{false};
                    const ClientWait wait("the server",
                                          [&] {  // the first to ask waits for its turn
                                            if (!asked.exchange(true)) {
                                              asked.notify_all();
                                              returned.wait(false);
                                            }
                                            return false;
                                          });
                    const ClientWait no_wait("the server", {});
                    ServerDialer dialer(kHost, server->port(), kKey, no_wait, {});
                    ConnectionPool pool(dialer, wait);
                    auto held = pool.take(within(10s));
                    pool.stop_growing();
                    auto waiting =
                        std::async(std::launch::async, [&] { return pool.take(within(20s)); });
                    asked.wait(false);
                    pool.give_back(std::move(held));
                    const bool overtook = pool.take(within(0s)).has_value();
                    returned = true;
                    returned.notify_all();
                    expect(!overtook, "a call that arrives later takes nothing");
                    pool.give_back(waiting.get());
                    expect(pool.take(within(0s)).has_value(), "free again");
                  });

const Test kSettledGone(
    "tcp store: a connected client without its server gets an error in every thread", [] {
      auto server = TcpStore::serve(kHost, 0, kKey);
      const auto client = TcpStore::connect(kHost, server->port(), kKey, within(10s));
      client->all_ranks_connected();
      server->all_ranks_connected();
      std::vector<std::future<void>> waiting;
      for (int i = 0; i < 3; ++i)
        waiting.push_back(std::async(std::launch::async, [&] {
          expect_says(expect_throws<PeerLost>([&] { client->get("never", within(20s)); }),
                      "lost the store");
        }));
      client->set("key", "value");
      server.reset();
      for (auto& one : waiting) one.get();
      expect_throws<PeerLost>([&] { client->set("key", "value"); });
    });

// ThreadSanitizer's run time does not know the parent's threads in a child, which has none to race.
#ifndef __SANITIZE_THREAD__
const Test kForked("tcp store: a forked child releases its parent's server, which keeps serving",
                   [] {
                     auto server = TcpStore::serve(kHost, 0, kKey);
                     const auto client =
                         TcpStore::connect(kHost, server->port(), kKey, within(10s));
                     const pid_t child = ::fork();
                     if (child == 0) {
                       ::alarm(20);
                       server.reset();
                       ::_exit(7);
                     }
                     int status = 0;
                     ::waitpid(child, &status, 0);
                     expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child ends");
                     client->set("key", "value");
                     expect_equal(server->get("key", within(1s)), "value", "the parent serves");
                   });
#endif

ConnectOptions options_of(int rank, int size, std::chrono::nanoseconds timeout) {
  ConnectOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  return options;
}

// One rank in `rounds` groups of one name, one after another.
std::vector<std::string> form_again(Store& store, int rank, int size, int rounds) {
  std::vector<std::string> names;
  for (int round = 0; round < rounds; ++round) {
    const auto group = connect(store, options_of(rank, size, 30s));
    int sum = 1;
    group->run({.operation = Operation::all_reduce,
                .dtype = Dtype::int32,
                .input = &sum,
                .output = &sum,
                .count = 1});
    expect_equal(sum, size, "ranks that took part");
    names.push_back(group->info().name);
    // The first rank to finish begins the next group while the others still leave this one.
  }
  return names;
}

void all_form_again(const std::vector<Store*>& stores) {
  const int size = static_cast<int>(stores.size());
  std::vector<std::future<std::vector<std::string>>> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      return form_again(*stores[static_cast<size_t>(rank)], rank, size, 5);
    }));
  for (auto& rank : ranks)
    expect(
        rank.get() == std::vector<std::string>{"world", "world#2", "world#3", "world#4", "world#5"},
        "each group has a name of its own");
}

const Test kLocalAgain("store: five groups of one name, one after another, in one local store", [] {
  LocalStore store;
  all_form_again({&store, &store, &store});
  for (const std::string key :
       {"world/rank_info/0", "world#2/rank_info/1", "world/key", "world#5/key"})
    expect(!store.find(key).has_value(), key + " is still there");
});

const Test kTcpAgain("store: five groups of one name, one after another, in one tcp store", [] {
  const auto server = TcpStore::serve(kHost, 0, kKey);
  const auto one = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  const auto two = TcpStore::connect(kHost, server->port(), kKey, within(10s));
  all_form_again({server.get(), one.get(), two.get()});
});

const Test kFailedForming("store: a failed forming does not count, and leaves no rank info", [] {
  LocalStore store;
  const ConnectOptions alone = options_of(0, 2, 50ms);
  for (int i = 0; i < 2; ++i) expect_throws<Timeout>([&] { connect(store, alone); });
  expect(!store.find("world/rank_info/0").has_value(), "no note");
  all_form_again({&store, &store});
});

// One rank's end of a store.
class Watched final : public Store {
 public:
  explicit Watched(Store& inner) : inner_(inner) {}
  void set(const std::string& key, const std::string& value, const Deadline& deadline) override {
    inner_.set(key, value, deadline);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    if (before_get) before_get(key);
    std::string value = inner_.get(key, deadline);
    last_got_ = key;
    return value;
  }
  int64_t add(const std::string& key, int64_t amount, const Deadline& deadline) override {
    const int64_t sum = inner_.add(key, amount, deadline);
    if (after_change) after_change(last_got_);
    return sum;
  }
  std::optional<std::string> remove(const std::string& key, const Deadline& deadline) override {
    auto value = inner_.remove(key, deadline);
    if (after_change) after_change(last_got_);
    return value;
  }
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline) override {
    return inner_.claim(key, value, deadline);
  }
  std::function<void(const std::string& key)> before_get;
  std::function<void(const std::string& last_got)> after_change;

 private:
  Store& inner_;
  std::string last_got_;
};

// Rank 1 reads the rank info only after rank 0 has read it and reacted.
const Test kOtherOptions("store: all ranks report different options, in any order of reading", [] {
  LocalStore store;
  Watched first(store), last(store);
  std::promise<void> acted;
  first.after_change = [&, once = false](const std::string& last_got) mutable {
    if (last_got == "world/rank_info/1" && !std::exchange(once, true)) acted.set_value();
  };
  last.before_get = [&](const std::string& key) {
    if (key == "world/rank_info/0") acted.get_future().wait();
  };
  const auto refused = [](Store& end, int rank) {
    ConnectOptions options = options_of(rank, 2, 5s);
    options.reproducible = rank == 1;
    expect_says(expect_throws<Mismatch>([&] { connect(end, options); }), "reproducible=True");
  };
  auto other = std::async(std::launch::async, [&] { refused(last, 1); });
  refused(first, 0);
  other.get();
  for (const std::string key : {"world/rank_info/0", "world/rank_info/1", "world/key",
                                "world/refused", "world/refused/all"})
    expect(!store.find(key).has_value(), key + " is still there");
  auto again = std::async(std::launch::async,
                          [&] { return connect(store, options_of(1, 2, 5s))->info().name; });
  expect_equal(connect(store, options_of(0, 2, 5s))->info().name, "world#2", "the next");
  expect_equal(again.get(), "world#2", "the next of the other");
});

// The keys that rank 1 would remove after forming are gone with rank 0.
const Test kLeft("store: rank 0 and its store may leave once the group is established", [] {
  LocalStore store;
  Watched end(store);
  end.after_change = [](const std::string& last_got) {
    if (!last_got.empty()) throw PeerLost("the store has gone");
  };
  auto other =
      std::async(std::launch::async, [&] { return connect(end, options_of(1, 2, 5s))->size(); });
  const auto group = connect(store, options_of(0, 2, 5s));
  expect_equal(other.get(), 2, "ranks");
});

}  // namespace
