// Plans of two levels at work: groups whose ranks are told that they are on several hosts, over
// every transport, against a plain model. levels_test.cpp proves the plans; hosts for real are in
// tests/test_hosts.py.
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "group/host_group.h"
#include "harness.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using ranks::Arrays;
using ranks::ByTransport;
using ranks::Case;
using ranks::expect_result;
using ranks::kSlowdown;
using ranks::run_case;

constexpr size_t kRing = size_t{256} << 10;

// Runs `body` on ranks of which `hosts` says, by rank, where each is.
void run_on_hosts(const std::vector<int>& hosts, const std::string& by,
                  const std::function<void(Group&)>& body) {
  const size_t size = hosts.size();
  std::vector<Mesh> meshes(size);
  for (size_t rank = 0; rank < size; ++rank) {
    meshes[rank].channels.resize(size);
    for (size_t i = 0; i < size; ++i) {
      const std::string host = "host " + std::to_string(hosts[i]);
      meshes[rank].members.push_back({host, static_cast<int64_t>(i), i == rank ? "self" : by});
      meshes[rank].hosts.push_back(host);
    }
    for (size_t peer = 0; peer < rank; ++peer) {
      ranks::Ends ends = ranks::channel_pair(by, kRing);
      meshes[rank].channels[peer] = std::move(ends.a);
      meshes[peer].channels[rank] = std::move(ends.b);
    }
  }
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  ranks::run(static_cast<int>(size), [&](int rank) {
    ConnectOptions options;
    options.rank = rank;
    options.size = static_cast<int>(size);
    options.timeout = std::chrono::seconds(30);  // far beyond any call that works
    options.heartbeat = {};                      // frames are counted: none but those of calls
    HostGroup group(options, std::move(meshes[static_cast<size_t>(rank)]), all);
    expect(group.hosts() == hosts, "the hosts of the group");
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

void run_cases(Group& group) {
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
          run_case(group, c);
        }
    }
}

const ByTransport kTwoLevels{"two levels are right on hosts of every kind",
                             [](const std::string& by) {
                               const size_t step = kSlowdown > 1 && by != "local" ? 4 : 1;
                               for (size_t i = 0; i < kMaps.size(); i += step)
                                 run_on_hosts(kMaps[i], by, run_cases);
                             }};

// What is chosen for many bytes on several hosts, and what runs in blocks there: ranks that do
// different work have to cut the same ones.
const Test kBlocks{
    "two levels of a call with too much scratch, and as chosen", [] {
      constexpr size_t kCount = 2'500'001;
      run_on_hosts({0, 1, 1}, "local", [](Group& group) {
        bool in_place = false;
        for (const Algorithm algorithm : {Algorithm::hierarchical, Algorithm::automatic})
          for (const Operation operation : {Operation::all_reduce, Operation::reduce}) {
            in_place = !in_place;
            const Case c{operation, algorithm, Dtype::float32, ReduceOp::sum,
                         kCount,    1,         in_place,       1};
            Arrays arrays(c, group.rank(), group.size());
            group.run(arrays.call);
            expect_result(c, arrays, group.rank(), group.size());
          }
      });
    }};

}  // namespace
