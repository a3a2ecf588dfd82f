// The hierarchical algorithm: groups with simulated hosts, over every transport, with and without
// memory that the ranks of a host share, against a plain model. levels_test.cpp proves the plans;
// tests/hosts/test_hosts.py uses real hosts.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "group/host_group.h"
#include "harness.h"
#include "ranks.h"
#include "rendezvous/local_store.h"
#include "shared/segment.h"
#include "transport/transport.h"

namespace {

using namespace pycomm;
using namespace pycomm::group;
using namespace pycomm::transport;
using namespace ranks;

constexpr size_t kRing = size_t{256} << 10;

// Runs `body` on ranks; `hosts` is the host of each. If the ranks of a host share memory
// (`shares`), they are connected by `by`, others by tcp; else all are connected by `by`.
void run_on_hosts(const std::vector<int>& hosts, const std::string& by,
                  const std::function<void(Group&)>& body, bool shares = false) {
  static int runs = 0;
  const std::string meeting = "hosts " + std::to_string(runs++);
  const size_t size = hosts.size();
  std::vector<bootstrap::Mesh> meshes(size);
  for (size_t rank = 0; rank < size; ++rank) {
    meshes[rank].channels.resize(size);
    for (size_t i = 0; i < size; ++i) {
      const std::string host = "host " + std::to_string(hosts[i]);
      meshes[rank].members.push_back({host, static_cast<int64_t>(i), i == rank ? "self" : by});
      meshes[rank].hosts.push_back(host);
    }
    for (size_t peer = 0; shares && peer < size; ++peer)
      meshes[rank].memories.push_back(
          hosts[peer] == hosts[rank]
              ? local_memory(meeting, static_cast<int>(peer), sizeof(shared::Segment))
              : nullptr);
    for (size_t peer = 0; peer < rank; ++peer) {
      const bool apart = shares && hosts[peer] != hosts[rank];
      Ends ends = channel_pair(apart ? "tcp" : by, kRing);
      meshes[rank].channels[peer] = std::move(ends.a);
      meshes[peer].channels[rank] = std::move(ends.b);
    }
  }
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  run(static_cast<int>(size), [&](int rank) {
    ConnectOptions options;
    options.rank = rank;
    options.size = static_cast<int>(size);
    options.timeout = std::chrono::seconds(30);  // far beyond any call that works
    options.heartbeat = {};                      // frames are counted: none but those of calls
    HostGroup group(options, std::move(meshes[static_cast<size_t>(rank)]), all);
    expect(group.info().hosts == hosts, "the hosts of the group");
    body(group);
  });
}

// Hosts are numbered in order of their first ranks.
const std::vector<std::vector<int>> kMaps{{0, 1},       {0, 0, 1},       {0, 1, 0},
                                          {0, 1, 2},    {0, 0, 1, 1},    {0, 1, 0, 1},
                                          {0, 1, 1, 1}, {0, 0, 0, 1, 1}, {0, 1, 1, 2, 0}};

const std::vector<Operation> kOperations{Operation::all_reduce,     Operation::reduce,
                                         Operation::broadcast,      Operation::all_gather,
                                         Operation::reduce_scatter, Operation::barrier};

void run_cases(Group& group, const std::function<void(Group&, const Case&)>& run_one) {
  int call = 0;
  for (const Operation operation : kOperations)
    for (const size_t count : {0, 1, 7, 1000, 65'541}) {
      if (operation == Operation::barrier && count > 0) continue;
      Case c{operation, Algorithm::hierarchical, Dtype::float32, ReduceOp::sum, count, 0, false, 0};
      if (call % 3 == 1) c.op = ReduceOp::max;
      if (call % 3 == 2) c.dtype = Dtype::uint8;
      const int roots = c.rooted() && (kSlowdown == 1 || count <= 1000) ? group.size() : 1;
      for (c.root = 0; c.root < roots; ++c.root)
        for (const bool in_place : {false, true}) {
          c.in_place = in_place;
          c.call = ++call;
          run_one(group, c);
        }
    }
}

const ByTransport kTwoLevels("hierarchical calls are right on hosts of every kind",
                             [](const std::string& by) {
                               const size_t step = kSlowdown > 1 && by != "local" ? 4 : 1;
                               for (size_t i = 0; i < kMaps.size(); i += step)
                                 run_on_hosts(kMaps[i], by, [](Group& group) {
                                   run_cases(group, run_case);  // the frames are the plan's
                                 });
                             });

const Test kShared("hierarchical calls are right on hosts whose ranks share memory", [] {
  for (const std::string by : {"local", "shm"})
    for (size_t i = 0; i < kMaps.size(); i += kSlowdown > 1 ? 4 : 1)
      run_on_hosts(kMaps[i], by, [](Group& group) { run_cases(group, run_plain); }, true);
});

// In one lane, beside pieces of one or two elements.
const Test kLeftOver("hierarchical calls with a remainder larger than a lane's piece", [] {
  run_on_hosts(
      {0, 1, 1, 0, 0, 1}, "local",
      [](Group& group) {
        int call = 0;
        for (const size_t count : {4, 5, 8})
          run_plain(group, {Operation::all_reduce, Algorithm::hierarchical, Dtype::float32,
                            ReduceOp::sum, count, 0, true, ++call});
      },
      true);
});

// A rank on another host differs in a count, an operation or an algorithm: no array changes, and
// the group continues.
const Test kDisagreement("a disagreement between hosts or inside one changes nothing", [] {
  const auto body = [](Group& group) {
    for (int odd = 0; odd < group.size(); ++odd)
      for (const size_t count : {300, 700'000}) {
        Call call{.operation = Operation::all_reduce,
                  .dtype = Dtype::float32,
                  .count = count,
                  .algorithm = Algorithm::hierarchical};
        if (group.rank() == odd && count == 300) call.count = 200;
        if (group.rank() == odd && count > 300) call.algorithm = Algorithm::ring;
        Array array(call.dtype, count);
        array.fill([&](size_t i) { return element(group.rank(), i); });
        const Array before = array;
        call.input = call.output = array.data();
        const auto ending = ending_of([&] { group.run(call); });
        expect(ending.is(ErrorKind::mismatch), "not a mismatch: " + ending.text());
        expect(array == before, "an array has changed");
        run_plain(group, {Operation::all_reduce, Algorithm::hierarchical, Dtype::float32,
                          ReduceOp::sum, 700'001, 0, true, 1});
      }
  };
  for (const auto& hosts : {std::vector{0, 1, 1}, {0, 0, 1, 1}, {0, 0, 0, 1, 1}})
    if (kSlowdown == 1 || hosts.size() == 3) run_on_hosts(hosts, "shm", body, true);
});

// The ranks of its host detect a rank that left, and tell all others.
const Test kGone("a rank that left cleanly is missed on all hosts", [] {
  run_on_hosts(
      {0, 0, 1, 1}, "shm",
      [](Group& group) {
        if (group.rank() == 3) return group.close();
        std::vector<float> x(700'000);
        ending_of([&] { group.run(sum_in_place(x)); }).check(ErrorKind::peer_lost, {"rank 3"});
      },
      true);
});

// The default algorithm for many bytes on several hosts, and calls that run in blocks: ranks that
// do different work have to use the same blocks.
const Test kBlocks("hierarchical calls with too much scratch, and by default choice", [] {
  constexpr size_t kCount = 2'500'001;
  const auto body = [](Group& group) {
    bool in_place = false;
    for (const Algorithm algorithm : {Algorithm::hierarchical, Algorithm::automatic})
      for (const Operation operation : {Operation::all_reduce, Operation::reduce}) {
        in_place = !in_place;
        const Case c{operation, algorithm, Dtype::float32, ReduceOp::sum, kCount, 1, in_place, 1};
        run_plain(group, c);
      }
  };
  run_on_hosts({0, 1, 1}, "local", body);
  for (const auto& hosts :
       {std::vector{0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3}})
    if (kSlowdown == 1 || hosts.size() == 4) run_on_hosts(hosts, "local", body, true);
});

// A channel that reports another round trip.
class Distant final : public Channel {
 public:
  Distant(std::unique_ptr<Channel> inner, std::chrono::microseconds round_trip)
      : inner_(std::move(inner)), round_trip_(round_trip) {}
  std::string_view transport() const override { return inner_->transport(); }
  std::chrono::microseconds round_trip() const override { return round_trip_; }
  size_t send(ConstBytes head, ConstBytes body) override { return inner_->send(head, body); }
  ConstBytes peek(size_t want) override { return inner_->peek(want); }
  void take(size_t bytes) override { inner_->take(bytes); }
  size_t receive(Bytes into) override { return inner_->receive(into); }
  bool is_closed() const override { return inner_->is_closed(); }
  pollfd arm(Want want) override { return inner_->arm(want); }
  void disarm(short revents) override { inner_->disarm(revents); }
  void close(ConstBytes unsent) override { inner_->close(unsent); }

 private:
  std::unique_ptr<Channel> inner_;
  std::chrono::microseconds round_trip_;
};

const Test kRoundTrips("ranks that measured different round trips choose the same algorithm", [] {
  rendezvous::LocalStore store;
  run(2, [&](int rank) {
    ConnectOptions options;
    options.rank = rank;
    options.size = 2;
    options.timeout = std::chrono::seconds(30);  // far beyond any call that works
    options.transport = "tcp";
    options.address = "127.0.0.1";
    options.host = "host" + std::to_string(rank);
    options.wrap.limit_rate = [rank](std::unique_ptr<Channel> inner, int) {
      const std::chrono::milliseconds round_trip(rank == 0 ? 1 : 100);
      return std::make_unique<Distant>(std::move(inner), round_trip);
    };
    const auto group = connect(store, options);
    std::vector<float> x(100'000, 1.0F);
    group->run(sum_in_place(x));
    expect(std::ranges::count(x, 2.0F) == static_cast<std::ptrdiff_t>(x.size()), "the sum");
  });
});

}  // namespace
