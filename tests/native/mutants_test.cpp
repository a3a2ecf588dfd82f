// The prover against plans that were broken on purpose. Each error must name the fault.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "collectives/choose.h"
#include "collectives/collectives.h"
#include "harness.h"

namespace pycomm {
namespace {

using collectives::Combine;
using collectives::kNoRank;
using collectives::Move;
using collectives::Plan;
using collectives::Range;
using enum collectives::Space;
using enum Algorithm;
using Plans = std::vector<Plan>;

// A fault of a plan that the prover accepts, and what the prover says of it.
struct Mutant {
  std::string name;
  Algorithm algorithm;
  int size;
  Case what;
  std::string wanted;
  std::function<void(Plans&)> break_it;
};

void expect_caught(const Mutant& m) {
  Plans plans = plans_of(m.algorithm, m.size, m.what);
  expect_equal(prove(plans, m.what).error, std::string(), "before it was broken");
  m.break_it(plans);
  const std::string error = prove(plans, m.what).error;
  expect(
      error.find(m.wanted) != std::string::npos,
      title(m.algorithm, m.size, m.what) + ": wanted \"" + m.wanted + "\", got \"" + error + "\"");
}

const Case kReduce8{Operation::all_reduce, 8}, kGather8{Operation::all_gather, 8};
const Case kReduce100k{Operation::all_reduce, 100'000}, kBarrier{Operation::barrier};
const Case kGatherTo1{Operation::gather, 8, 1}, kScatterOf1{Operation::scatter, 8, 1};
const Case kReduceTo1{Operation::reduce, 8, 1}, kReduceScatter8{Operation::reduce_scatter, 8};
const Case kAllToAll8{Operation::all_to_all, 8};
const Case kReduce9{Operation::all_reduce, 9}, kReduce10{Operation::all_reduce, 10};

// Each rank adds in an order of its own.
void reorder(Plans& plans) {
  const auto size = static_cast<int>(plans.size());
  for (int rank = 0; rank < size; ++rank)
    for (Move& move : plans[static_cast<size_t>(rank)].moves)
      if (move.in.space == scratch)
        move.in.begin = static_cast<size_t>((move.from - rank + size) % size) * move.in.count;
}

// Two ranks exchange their inputs, and add them to their own.
void exchange(Plans& plans) {
  plans = Plans(2);
  for (int rank = 0; rank < 2; ++rank)
    plans[static_cast<size_t>(rank)].moves.push_back(
        {1 - rank, {input, 0, 8}, 1 - rank, {output, 0, 8}, Combine::finish, {input, 0, 8}});
}

const Case kAliased = [] {
  Case what = kReduce8;
  what.aliased = true;
  return what;
}();

const std::vector<Mutant> kMutants{
    {"the wrong piece is sent", ring, 4, kReduce8,
     "rank 3, move 0: element 4: it is added to element 2",
     [](Plans& plans) { plans[2].moves[0].out = collectives::piece(input, 8, 4, 2); }},
    {"a move is missing", ring, 4, kReduce8,
     "deadlock; rank 1 cannot send to rank 2 in move 5; rank 3 waits for rank 2",
     [](Plans& plans) { plans[2].moves.pop_back(); }},
    {"the last step is missing everywhere", ring, 4, kReduce8, "is read before it is there",
     [](Plans& plans) {
       for (Plan& plan : plans) plan.moves.pop_back();
     }},
    {"receives in another order than sends", direct, 3, kReduce8,
     "deadlock; rank 0 cannot send to rank 1 in move 1; rank 0 waits for rank 1 in move 1",
     [](Plans& plans) {
       for (Plan& plan : plans) {
         std::swap(plan.moves[1].from, plan.moves[2].from);
         std::swap(plan.moves[1].in, plan.moves[2].in);
       }
     }},
    {"a rank is counted twice", direct, 3, kReduce8,
     "rank 1, move 4: element 0: rank 1 is counted twice",
     [](Plans& plans) {
       auto& moves = plans[1].moves;
       moves.insert(moves.end() - 1, {1, {input, 0, 8}, 1, {scratch, 16, 8}});
     }},
    {"each rank adds in its own order", direct, 3, kReduce8,
     "rank 1, at the end: element 0: it is added up otherwise than on rank 0", reorder},
    {"scratch is read before it is there", tree, 4, kReduce8,
     "rank 2, move 1: element 0 of scratch is read before it is there",
     [](Plans& plans) { plans[2].moves[0].in.space = output; }},
    {"scratch is read before a move writes it", tree, 4, kReduce8,
     "rank 2, move 0: element 0 of scratch is read before it is there",
     [](Plans& plans) { std::swap(plans[2].moves[0], plans[2].moves[1]); }},
    {"one place of scratch instead of two: the step's own send reads it", ring, 4, kReduce8,
     "`in` overlaps `out`", [](Plans& plans) { plans[1].moves[1].in.begin = 0; }},
    {"the same in two moves: the received data is sent instead of the intended data", ring, 4,
     kReduce8, "rank 2, move 1: element 4: it is added to element 6",
     [](Plans& plans) {
       auto& moves = plans[1].moves;
       const Move send{moves[1].to, moves[1].out};
       moves[1].to = kNoRank;
       moves[1].in.begin = 0;
       moves.insert(moves.begin() + 2, send);
     }},
    {"received into the wrong place", direct, 3, kGather8,
     "rank 0, at the end: element 8: it is element 16",
     [](Plans& plans) { std::swap(plans[0].moves[2].in, plans[0].moves[3].in); }},
    {"no rank finishes", ring, 4, kReduce8, "element 0: it is not finished",
     [](Plans& plans) { plans[0].moves[2].combine = Combine::reduce; }},
    {"finished twice", ring, 4, kReduce8, "a finished sum is added to",
     [](Plans& plans) { plans[0].moves[1].combine = Combine::finish; }},
    {"finished again at the end", direct, 2, kReduce8, "a finished sum is added to",
     [](Plans& plans) {
       auto& moves = plans[0].moves;
       moves.push_back({0, {output, 0, 8}, 0, {scratch, 0, 8}});
       moves.push_back(Move(moves[2]));
     }},
    {"the output is written before all have been heard of", ring, 4, kGather8,
     "rank 1, move 0: output element 0 is written before rank 2 has been heard of",
     [](Plans& plans) {
       for (Plan& plan : plans) plan.moves.erase(plan.moves.begin(), plan.moves.begin() + 3);
     }},
    {"the output is written before all have been heard of", direct, 4, kGather8,
     "rank 1, move 0: output element 0 is written before rank 2 has been heard of",
     [](Plans& plans) {
       for (Plan& plan : plans) plan.moves.erase(plan.moves.begin(), plan.moves.begin() + 3);
     }},
    {"the output is written as if it were scratch", ring, 4, kReduce8, "is written before rank",
     [](Plans& plans) {
       plans[1].moves[0].in.space = output;
       plans[1].moves[1].out.space = output;
     }},
    // Rank 2 may have heard of rank 1 before it sends to rank 0, but that send waits for nothing.
    {"a rank is heard of by another one only", direct, 3, kGather8,
     "rank 0, move 2: output element 16 is written before rank 1 has been heard of",
     [](Plans& plans) {
       plans[0].moves[1].from = kNoRank;
       plans[1].moves[1].to = kNoRank;
     }},
    {"halving sends the wrong part", halving, 5, kReduce10, "it is added to element",
     [](Plans& plans) { plans[2].moves[5].out.begin -= 2; }},
    {"halving keeps the wrong part", halving, 5, kGather8, "at the end: element",
     [](Plans& plans) { std::swap(plans[2].moves[4].in, plans[2].moves[5].in); }},
    {"halving does not finish", halving, 5, kReduceScatter8, "it is not finished",
     [](Plans& plans) { plans[4].moves[7].combine = Combine::reduce; }},
    // The second token is sent from a place that the first receive does not write.
    {"a token that waits for nothing", halving, 4, kBarrier, "it has not heard of rank",
     [](Plans& plans) {
       plans[1].moves[2].out.begin = 0;
       plans[1].moves[2].in.begin = 1;
     }},
    {"tokens without elements", halving, 4, kBarrier, "it has not heard of rank",
     [](Plans& plans) {
       for (Plan& plan : plans)
         for (Move& move : plan.moves) move.out.count = move.in.count = 0;
     }},
    {"a gather by a tree misplaces parts", tree, 4, kGatherTo1, "rank 1, at the end: element",
     [](Plans& plans) { std::swap(plans[1].moves[3].in, plans[1].moves[4].in); }},
    {"a scatter by a tree misplaces parts", tree, 4, kScatterOf1, "at the end: element 0: it is",
     [](Plans& plans) { plans[1].moves.back().out.begin = 8; }},
    {"a reduce by a ring does not finish", ring, 4, kReduceTo1, "it is not finished",
     [](Plans& plans) { plans[1].moves[0].combine = Combine::reduce; }},
    {"a reduce by a ring loses a rank", ring, 4, kReduceTo1, "lacks rank",
     [](Plans& plans) { plans[3].moves[0].combine = Combine::copy; }},
    {"a piece through a tree is finished early", tree, 6, kReduce100k, "a finished sum is added to",
     [](Plans& plans) { plans[1].moves[0].combine = Combine::finish; }},
    {"the wrong piece through a tree", tree, 6, kReduce100k, "it is added to element",
     [](Plans& plans) { plans[5].moves[1].out.begin = 0; }},
    {"`in` overlaps `out` in place only", direct, 2, kAliased,
     "rank 0, move 0: `in` overlaps `out`", exchange},
    {"elements are forwarded too early", direct, 4, kGatherTo1,
     "rank 1, move 0: output element 16 is written before rank 0 has been heard of",
     [](Plans& plans) {
       for (Plan& plan : plans) plan.moves.erase(plan.moves.begin());
       plans[1].moves.erase(plans[1].moves.begin(), plans[1].moves.begin() + 2);
     }},
    {"a gather puts parts into each other's place", direct, 4, kGatherTo1,
     "rank 1, at the end: element 16: it is element 24",
     [](Plans& plans) { std::swap(plans[1].moves[3].in, plans[1].moves[4].in); }},
    {"a scatter sends parts to each other's rank", direct, 4, kScatterOf1,
     "rank 2, at the end: element 0: it is element 24",
     [](Plans& plans) { std::swap(plans[1].moves[0].out, plans[1].moves[1].out); }},
    {"an all_to_all sends the wrong part", direct, 4, kAllToAll8,
     "rank 2, at the end: element 0: it is element 24",
     [](Plans& plans) { plans[0].moves[4].out.begin = 24; }},
    {"a reduce counts a rank twice", direct, 4, kReduceTo1,
     "rank 1, move 5: element 0: rank 2 is counted twice",
     [](Plans& plans) {
       auto& moves = plans[1].moves;
       moves.insert(moves.end() - 1, {1, {scratch, 16, 8}, 1, {scratch, 8, 8}});
     }},
    {"a copy instead of a sum", ring, 4, kReduce8, "lacks rank",
     [](Plans& plans) { plans[1].moves[0].combine = Combine::copy; }},
    {"a range that does not exist", ring, 4, kReduce8, "`in` leaves its memory",
     [](Plans& plans) { plans[1].scratch = 3; }},
    {"a peer that does not exist", ring, 4, kReduce8, "its peer is not in the group",
     [](Plans& plans) { plans[1].moves[0].to = 4; }},
    {"the input is written", ring, 4, kReduce8, "it writes to the input",
     [](Plans& plans) { plans[1].moves[0].in = plans[1].moves[0].with; }},
    {"an element is missing", ring, 4, kReduce9, "elements are due",
     [](Plans& plans) { --plans[1].moves[4].out.count; }},
};

const bool kRegistered = [] {
  for (const Mutant& mutant : kMutants)
    Test("mutant: " + mutant.name, [&mutant] { expect_caught(mutant); });
  return true;
}();

const Test kSound("changes that are no fault", [] {
  Plans pair = plans_of(direct, 2, kReduce8);
  reorder(pair);  // two operands can be swapped
  expect_equal(prove(pair, kReduce8).error, std::string(), "two ranks");
  exchange(pair);
  expect_equal(prove(pair, kReduce8).error, std::string(), "two arrays");
});

// Rank 1 sends to 0 and then to 2, and takes from 2, which waits for that, and then from 0. Rank 0
// has a place to send; if rank 1's message belongs there, no rank can begin.
const Test kOccupied("mutant: a receive into a place whose send waits for the receive", [] {
  const Range first{scratch, 0, 1}, second{scratch, 1, 1}, given{input, 0, 1};
  Plans plans(3);
  plans[0] = {{{0, given, 0, first}, {1, first}, {kNoRank, {}, 1, second}}, 2};
  plans[1] = {{{0, given}, {2, given}, {kNoRank, {}, 2, first}, {kNoRank, {}, 0, second}}, 2};
  plans[2] = {{{kNoRank, {}, 1, first}, {1, first}}, 1};
  const Case what{Operation::all_reduce, 1};
  expect_equal(prove(plans, what).error,
               std::string("rank 0, at the end: element 0 of output is read before it is there"),
               "with two places");
  plans[0].moves[2].in = first;
  expect_equal(
      prove(plans, what).error,
      std::string("deadlock; rank 0 cannot send to rank 1 in move 1; rank 0 waits for rank 1 "
                  "in move 2; "
                  "rank 1 cannot send to rank 0 in move 0; rank 1 waits for rank 2 in move 2; "
                  "rank 2 cannot send to rank 1 in move 1; rank 2 waits for rank 1 in move 0"),
      "with one place");
});

// Rank 2 sends back to 0 what it had from there, into the place that 0 still has to send to 1,
// which takes from 2 first.
const Test kDelayed("a place that waits for its send costs a step", [] {
  const Range result{output, 0, 1}, spare{scratch, 0, 1};
  Plans plans(3);
  plans[0] = {{{2, result}, {1, result}, {kNoRank, {}, 2, result}}, 1};
  plans[1] = {{{kNoRank, {}, 2, result}, {kNoRank, {}, 0, spare}}, 1};
  plans[2] = {{{kNoRank, {}, 0, result}, {1, result}, {0, result}}, 0};
  const Case what{Operation::broadcast, 1};
  expect_equal(prove(plans, what).steps, 4, "steps with one place");
  plans[0].moves[2].in = spare;
  expect_equal(prove(plans, what).steps, 3, "steps with two");
});

const Test kEmptyChain("mutant: a chain of empty messages is not a barrier", [] {
  Plans plans;
  for (int rank = 0; rank < 4; ++rank) plans.push_back(collectives::tree_all_reduce(rank, 4, 0));
  expect(prove(plans, kBarrier).error.find("it has not heard of rank") != std::string::npos,
         "the tree passed for a barrier");
});

const Test kRoot("mutant: the wrong root", [] {
  for (const Algorithm algorithm : collectives::algorithms_for(Operation::broadcast))
    expect_caught(
        {"",
         algorithm,
         4,
         {Operation::broadcast, 8, 2},
         "is read before it is there",
         [&](Plans& plans) { plans = plans_of(algorithm, 4, {Operation::broadcast, 8, 1}); }});
});

}  // namespace
}  // namespace pycomm
