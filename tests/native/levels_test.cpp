// Hierarchical plans on hosts of every kind: proven, with the elements between hosts and the steps
// that the comments above them promise, and broken on purpose.
#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cases.h"
#include "collectives/choose.h"
#include "harness.h"

namespace pycomm {
namespace {

const Operation kOperations[] = {Operation::all_reduce,     Operation::reduce,
                                 Operation::broadcast,      Operation::all_gather,
                                 Operation::reduce_scatter, Operation::barrier};

// By rank: the host. Hosts are numbered in order of their first ranks.
std::vector<std::vector<int>> host_maps() {
  return {
      {0, 1},
      {0, 0, 1},
      {0, 1, 1},
      {0, 0, 1, 1},
      {0, 1, 0, 1},
      {0, 1, 1, 0},
      {0, 0, 0, 1, 1},
      {0, 1, 2, 2, 1, 2},
      {0, 0, 1, 1, 2, 2},
      {0, 0, 0, 0, 0, 0, 0, 1},
      {0, 1, 1, 1, 1, 1, 1, 1, 1},
      {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
      {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
      {0, 1, 0, 2, 1, 0, 2, 2, 2, 1, 0, 3, 4, 3, 4, 4, 3},
      {0, 1, 2, 3, 4, 5, 6},
  };
}

int log_of(size_t n) { return static_cast<int>(std::bit_width(n - 1)); }

struct Hosts {
  size_t count = 0, most = 0, fewest = 0;  // hosts; ranks on the largest and the smallest
  explicit Hosts(const std::vector<int>& by_rank) {
    std::vector<size_t> ranks;
    for (const int host : by_rank) {
      if (static_cast<size_t>(host) == ranks.size()) ranks.push_back(0);
      ++ranks[static_cast<size_t>(host)];
    }
    count = ranks.size();
    most = *std::ranges::max_element(ranks);
    fewest = *std::ranges::min_element(ranks);
  }
};

// Elements that go to another host.
size_t crossing(const Case& what, const Hosts& hosts) {
  const size_t size = what.hosts.size(), others = hosts.count - 1;
  const std::map<Operation, size_t> found{
      {Operation::all_reduce, 2 * others * what.count},
      {Operation::reduce, others * what.count},
      {Operation::broadcast, others * what.count},
      {Operation::all_gather, others * size * what.count},
      {Operation::reduce_scatter, others * size * what.count},
      {Operation::barrier, hosts.count * static_cast<size_t>(log_of(hosts.count))}};
  return found.at(what.operation);
}

// Of short arrays.
int steps(const Case& what, const Hosts& hosts) {
  const int across = log_of(hosts.count), inside = log_of(hosts.most);
  const int lanes = static_cast<int>(hosts.fewest), most = static_cast<int>(hosts.most);
  const std::map<Operation, int> found{
      {Operation::all_reduce, 2 * across + 2 * inside},
      {Operation::reduce, across + inside + lanes - 1},
      {Operation::broadcast, across + inside + lanes - 1},
      {Operation::all_gather, across + inside + (most - 1) / lanes},
      {Operation::reduce_scatter, across + inside + (most - 1) / lanes},
      {Operation::barrier, across + 2 * (most - 1)}};
  return found.at(what.operation);
}

std::string name_of_case(const Case& what) {
  std::string name = title(Algorithm::hierarchical, static_cast<int>(what.hosts.size()), what);
  for (const int host : what.hosts)
    name += (&host == what.hosts.data() ? ", hosts " : " ") + std::to_string(host);
  return name;
}

void expect_proven(const Case& what) {
  const auto size = static_cast<int>(what.hosts.size());
  const Hosts hosts(what.hosts);
  const Proof proof = prove(plans_of(Algorithm::hierarchical, size, what), what);
  const std::string name = name_of_case(what);
  expect_equal(proof.error, std::string(), name);
  expect_equal(proof.crossed, crossing(what, hosts), name + ": elements between hosts");
  if (what.count >= 65536) return;
  expect(proof.steps <= steps(what, hosts), name + ": " + std::to_string(proof.steps) +
                                                " steps, not " +
                                                std::to_string(steps(what, hosts)));
  if (what.count >= 64 && hosts.most == hosts.fewest)
    expect_equal(proof.steps, steps(what, hosts), name + ": steps");
}

const Test kProof("hierarchical plans are proven on hosts of every kind", [] {
  for (const auto& hosts : host_maps())
    for (const Operation operation : kOperations)
      for (const size_t count : {0, 1, 2, 3, 7, 65, 70'001})
        for (const bool aliased : {false, true})
          if (!aliased || (operation != Operation::broadcast && operation != Operation::barrier))
            expect_proven({operation, count, 0, aliased, {}, hosts});
});

const Test kRoots("hierarchical plans are proven for every root", [] {
  for (const auto& hosts : host_maps())
    for (const Operation operation : {Operation::reduce, Operation::broadcast})
      for (const size_t count : {7, 70'001})
        for (int root = 0; root < static_cast<int>(hosts.size()); ++root)
          expect_proven({operation, count, root, false, {}, hosts});
});

// Up to 64 ranks, one of them on each host or all hosts full.
const Test kLarge("hierarchical plans are proven on 64 ranks", [] {
  for (const int here : {1, 2, 7, 8, 32}) {
    std::vector<int> hosts;
    for (int rank = 0; rank < 64; ++rank) hosts.push_back(rank / here);
    for (const Operation operation : kOperations)
      expect_proven({operation, 65, 0, false, {}, hosts});
  }
});

// The prover's errors for plans that were broken on purpose.
std::string error_of(const Case& what,
                     const std::function<void(std::vector<collectives::Plan>&)>& break_it) {
  auto plans = plans_of(Algorithm::hierarchical, static_cast<int>(what.hosts.size()), what);
  break_it(plans);
  return prove(plans, what).error;
}

void expect_named(const std::string& error, const std::string& wanted) {
  expect(error.find(wanted) != std::string::npos,
         "wanted \"" + wanted + "\", got \"" + error + "\"");
}

const Test kMutants("mutants of hierarchical plans are named exactly", [] {
  const Case sum{Operation::all_reduce, 8, 0, false, {}, {0, 0, 1, 1}};
  expect_named(error_of(sum,
                        [](auto& plans) {
                          for (collectives::Move& move : plans[1].moves)
                            if (move.combine == collectives::Combine::reduce)
                              move.combine = collectives::Combine::finish;
                        }),
               "a finished sum is added to");
  const Case gather{Operation::all_gather, 8, 0, false, {}, {0, 0, 0, 1, 1}};
  expect_named(error_of(gather,
                        [](auto& plans) {
                          auto& moves = plans[4].moves;
                          moves.insert(moves.begin(), {4,
                                                       {collectives::Space::input, 0, 8},
                                                       4,
                                                       {collectives::Space::output, 32, 8}});
                        }),
               "rank 4, move 0: output element 32 is written before rank 0 has been heard of");
  const Case scatter{Operation::reduce_scatter, 8, 0, false, {}, {0, 0, 0, 1, 1}};
  expect_named(error_of(scatter,
                        [](auto& plans) {
                          auto& moves = plans[0].moves;  // rank 2 gets rank 0's part
                          moves.back().out = moves[moves.size() - 2].out;
                        }),
               "rank 2, at the end: element 0: it is element 0");
  const Case barrier{Operation::barrier, 0, 0, false, {}, {0, 0, 1, 1}};
  expect_named(error_of(barrier,
                        [](auto& plans) {
                          plans[2].moves.back().out = {};
                          plans[3].moves.back().in = {};
                        }),
               "rank 3, at the end: it has not heard of rank 0");
});

// Plans made for other hosts still give the result; only the bytes between hosts differ.
const Test kWrongHosts("elements between hosts are counted", [] {
  Case what{Operation::all_reduce, 8, 0, false, {}, {0, 0, 1, 1}};
  const auto plans = plans_of(Algorithm::hierarchical, 4, what);
  what.hosts = {0, 1, 0, 1};
  const Proof proof = prove(plans, what);
  expect_equal(proof.error, std::string(), "proof");
  expect(proof.crossed > crossing(what, Hosts(what.hosts)), "nothing more crossed");
});

}  // namespace
}  // namespace pycomm
