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

using Break = std::function<void(std::vector<collectives::Plan>&)>;

void expect_caught(Algorithm algorithm, int size, const Case& what, const std::string& wanted,
                   const Break& break_it) {
  auto plans = plans_of(algorithm, size, what);
  expect_equal(prove(plans, what).error, std::string(), "before it was broken");
  break_it(plans);
  const std::string error = prove(plans, what).error;
  expect(error.find(wanted) != std::string::npos,
         title(algorithm, size, what) + ": wanted \"" + wanted + "\", got \"" + error + "\"");
}

const Case kReduce8{Operation::all_reduce, 8};
const Case kGather8{Operation::all_gather, 8};

void wrong_piece_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "rank 3, move 0: element 4: it is added to element 2",
                [](auto& plans) {
                  plans[2].moves[0].out = collectives::piece(collectives::Space::input, 8, 4, 2);
                });
}
const Test kWrongPiece{"mutant: the wrong piece is sent", wrong_piece_test};

void missing_test() {
  expect_caught(Algorithm::ring, 4, kReduce8,
                "deadlock; rank 1 cannot send to rank 2 in move 5; rank 3 waits for rank 2",
                [](auto& plans) { plans[2].moves.pop_back(); });
}
const Test kMissing{"mutant: a move is missing", missing_test};

void missing_everywhere_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "is read before it is there", [](auto& plans) {
    for (collectives::Plan& plan : plans) plan.moves.pop_back();
  });
}
const Test kMissingEverywhere{"mutant: the last step is missing everywhere",
                              missing_everywhere_test};

void order_test() {
  expect_caught(
      Algorithm::direct, 3, kReduce8,
      "deadlock; rank 0 cannot send to rank 1 in move 1; rank 0 waits for rank 1 in move 1",
      [](auto& plans) {
        for (collectives::Plan& plan : plans) {
          std::swap(plan.moves[1].from, plan.moves[2].from);
          std::swap(plan.moves[1].in, plan.moves[2].in);
        }
      });
}
const Test kOrder{"mutant: receives in another order than sends", order_test};

void twice_test() {
  expect_caught(
      Algorithm::direct, 3, kReduce8, "rank 1, move 4: element 0: rank 1 is counted twice",
      [](auto& plans) {
        auto& moves = plans[1].moves;
        moves.insert(
            moves.end() - 1,
            {1, {collectives::Space::input, 0, 8}, 1, {collectives::Space::scratch, 16, 8}});
      });
}
const Test kTwice{"mutant: a rank is counted twice", twice_test};

void own_order_test() {
  const Break break_it = [](auto& plans) {
    const auto size = static_cast<int>(plans.size());
    for (int rank = 0; rank < size; ++rank)
      for (collectives::Move& move : plans[static_cast<size_t>(rank)].moves)
        if (move.in.space == collectives::Space::scratch)
          move.in.begin = static_cast<size_t>((move.from - rank + size) % size) * move.in.count;
  };
  expect_caught(Algorithm::direct, 3, kReduce8,
                "rank 1, at the end: element 0: it is added up otherwise than on rank 0", break_it);
  // Two operands can be swapped.
  auto pair = plans_of(Algorithm::direct, 2, kReduce8);
  break_it(pair);
  expect_equal(prove(pair, kReduce8).error, std::string(), "two ranks");
}
const Test kOwnOrder{"mutant: each rank adds in its own order", own_order_test};

void early_read_test() {
  expect_caught(Algorithm::tree, 4, kReduce8,
                "rank 2, move 1: element 0 of scratch is read before it is there",
                [](auto& plans) { plans[2].moves[0].in.space = collectives::Space::output; });
  expect_caught(Algorithm::tree, 4, kReduce8,
                "rank 2, move 0: element 0 of scratch is read before it is there",
                [](auto& plans) { std::swap(plans[2].moves[0], plans[2].moves[1]); });
}
const Test kEarlyRead{"mutant: scratch is read before it is there", early_read_test};

void overwrite_test() {
  // One place of scratch instead of two: the step's own send reads it.
  expect_caught(Algorithm::ring, 4, kReduce8, "`in` overlaps `out`",
                [](auto& plans) { plans[1].moves[1].in.begin = 0; });
  // The same step as two moves: the received data is sent instead of the intended data.
  expect_caught(Algorithm::ring, 4, kReduce8, "rank 2, move 1: element 4: it is added to element 6",
                [](auto& plans) {
                  auto& moves = plans[1].moves;
                  const collectives::Move send{moves[1].to, moves[1].out};
                  moves[1].to = collectives::kNoRank;
                  moves[1].in.begin = 0;
                  moves.insert(moves.begin() + 2, send);
                });
}
const Test kOverwrite{"mutant: data is overwritten before it is sent", overwrite_test};

// Rank 1 sends to 0 and then to 2, and takes from 2, which waits for that, and then from 0. Rank 0
// has a place to send; if rank 1's message belongs there, no rank can begin.
void occupied_test() {
  const collectives::Range first{collectives::Space::scratch, 0, 1},
      second{collectives::Space::scratch, 1, 1}, input{collectives::Space::input, 0, 1};
  std::vector<collectives::Plan> plans(3);
  plans[0] = {{{0, input, 0, first}, {1, first}, {collectives::kNoRank, {}, 1, second}}, 2};
  plans[1] = {{{0, input},
               {2, input},
               {collectives::kNoRank, {}, 2, first},
               {collectives::kNoRank, {}, 0, second}},
              2};
  plans[2] = {{{collectives::kNoRank, {}, 1, first}, {1, first}}, 1};
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
}
const Test kOccupied{"mutant: a receive into a place whose send waits for the receive",
                     occupied_test};

// Rank 2 sends back to 0 what it had from there, into the place that 0 still has to send to 1,
// which takes from 2 first.
void delayed_test() {
  const collectives::Range output{collectives::Space::output, 0, 1},
      spare{collectives::Space::scratch, 0, 1};
  std::vector<collectives::Plan> plans(3);
  plans[0] = {{{2, output}, {1, output}, {collectives::kNoRank, {}, 2, output}}, 1};
  plans[1] = {{{collectives::kNoRank, {}, 2, output}, {collectives::kNoRank, {}, 0, spare}}, 1};
  plans[2] = {{{collectives::kNoRank, {}, 0, output}, {1, output}, {0, output}}, 0};
  const Case what{Operation::broadcast, 1};
  expect_equal(prove(plans, what).steps, 4, "steps with one place");
  plans[0].moves[2].in = spare;
  expect_equal(prove(plans, what).steps, 3, "steps with two");
}
const Test kDelayed{"a place that waits for its send costs a step", delayed_test};

void wrong_place_test() {
  expect_caught(Algorithm::direct, 3, kGather8, "rank 0, at the end: element 8: it is element 16",
                [](auto& plans) {
                  auto& moves = plans[0].moves;
                  std::swap(moves[2].in, moves[3].in);
                });
}
const Test kWrongPlace{"mutant: received into the wrong place", wrong_place_test};

void unfinished_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "element 0: it is not finished",
                [](auto& plans) { plans[0].moves[2].combine = collectives::Combine::reduce; });
}
const Test kUnfinished{"mutant: no rank finishes", unfinished_test};

void finished_twice_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "a finished sum is added to",
                [](auto& plans) { plans[0].moves[1].combine = collectives::Combine::finish; });
  expect_caught(Algorithm::direct, 2, kReduce8, "a finished sum is added to", [](auto& plans) {
    plans[0].moves.push_back(
        {0, {collectives::Space::output, 0, 8}, 0, {collectives::Space::scratch, 0, 8}});
    plans[0].moves.push_back(plans[0].moves[2]);
  });
}
const Test kFinishedTwice{"mutant: finished twice", finished_twice_test};

void early_write_test() {
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::direct})
    expect_caught(algorithm, 4, kGather8,
                  "rank 1, move 0: output element 0 is written before rank 2 has been heard of",
                  [](auto& plans) {
                    for (collectives::Plan& plan : plans)
                      plan.moves.erase(plan.moves.begin(), plan.moves.begin() + 3);
                  });
  expect_caught(Algorithm::ring, 4, kReduce8, "is written before rank", [](auto& plans) {
    plans[1].moves[0].in.space = collectives::Space::output;
    plans[1].moves[1].out.space = collectives::Space::output;
  });
  // Rank 2 may have heard of rank 1 before it sends to rank 0, but that send does not wait for it.
  expect_caught(Algorithm::direct, 3, kGather8,
                "rank 0, move 2: output element 16 is written before rank 1 has been heard of",
                [](auto& plans) {
                  plans[0].moves[1].from = collectives::kNoRank;
                  plans[1].moves[1].to = collectives::kNoRank;
                });
}
const Test kEarlyWrite{"mutant: the output is written before all have been heard of",
                       early_write_test};

void empty_chain_test() {
  const Case what{Operation::barrier};
  std::vector<collectives::Plan> plans;
  for (int rank = 0; rank < 4; ++rank) plans.push_back(collectives::tree_all_reduce(rank, 4, 0));
  expect(prove(plans, what).error.find("it has not heard of rank") != std::string::npos,
         "the tree passed for a barrier");
}
const Test kEmptyChain{"mutant: a chain of empty messages is not a barrier", empty_chain_test};

void halving_test() {
  expect_caught(Algorithm::halving, 5, {Operation::all_reduce, 10}, "it is added to element",
                [](auto& plans) { plans[2].moves[5].out.begin -= 2; });
  expect_caught(Algorithm::halving, 5, kGather8, "at the end: element",
                [](auto& plans) { std::swap(plans[2].moves[4].in, plans[2].moves[5].in); });
  expect_caught(Algorithm::halving, 5, {Operation::reduce_scatter, 8}, "it is not finished",
                [](auto& plans) { plans[4].moves[7].combine = collectives::Combine::reduce; });
}
const Test kHalving{"mutant: halving sends, adds or keeps the wrong parts", halving_test};

void token_test() {
  // The second token is sent from a place that the first receive does not write.
  expect_caught(Algorithm::halving, 4, {Operation::barrier}, "it has not heard of rank",
                [](auto& plans) {
                  plans[1].moves[2].out.begin = 0;
                  plans[1].moves[2].in.begin = 1;
                });
  expect_caught(Algorithm::halving, 4, {Operation::barrier}, "it has not heard of rank",
                [](auto& plans) {
                  for (collectives::Plan& plan : plans)
                    for (collectives::Move& move : plan.moves) move.out.count = move.in.count = 0;
                });
}
const Test kToken{"mutant: tokens that wait for nothing", token_test};

void rooted_trees_test() {
  expect_caught(Algorithm::tree, 4, {Operation::gather, 8, 1}, "rank 1, at the end: element",
                [](auto& plans) { std::swap(plans[1].moves[3].in, plans[1].moves[4].in); });
  expect_caught(Algorithm::tree, 4, {Operation::scatter, 8, 1}, "at the end: element 0: it is",
                [](auto& plans) { plans[1].moves.back().out.begin = 8; });
  expect_caught(Algorithm::ring, 4, {Operation::reduce, 8, 1}, "it is not finished",
                [](auto& plans) { plans[1].moves[0].combine = collectives::Combine::reduce; });
  expect_caught(Algorithm::ring, 4, {Operation::reduce, 8, 1}, "lacks rank",
                [](auto& plans) { plans[3].moves[0].combine = collectives::Combine::copy; });
}
const Test kRootedTrees{"mutant: rooted plans lose or misplace parts", rooted_trees_test};

void pipelined_test() {
  const Case what{Operation::all_reduce, 100'000};
  expect_caught(Algorithm::tree, 6, what, "a finished sum is added to",
                [](auto& plans) { plans[1].moves[0].combine = collectives::Combine::finish; });
  expect_caught(Algorithm::tree, 6, what, "it is added to element",
                [](auto& plans) { plans[5].moves[1].out.begin = 0; });
}
const Test kPipelined{"mutant: pieces through a tree", pipelined_test};

void overlap_test() {
  const Break break_it = [](auto& plans) {
    plans[0] = {};
    plans[1] = {};
    for (int rank = 0; rank < 2; ++rank)
      plans[static_cast<size_t>(rank)].moves.push_back({1 - rank,
                                                        {collectives::Space::input, 0, 8},
                                                        1 - rank,
                                                        {collectives::Space::output, 0, 8},
                                                        collectives::Combine::finish,
                                                        {collectives::Space::input, 0, 8}});
  };
  Case what = kReduce8;
  std::vector<collectives::Plan> plans(2);
  break_it(plans);
  expect_equal(prove(plans, what).error, std::string(), "two arrays");
  what.aliased = true;
  expect_caught(Algorithm::direct, 2, what, "rank 0, move 0: `in` overlaps `out`", break_it);
}
const Test kOverlap{"mutant: `in` overlaps `out` in place only", overlap_test};

void root_test() {
  for (const Algorithm algorithm : collectives::algorithms_for(Operation::broadcast))
    expect_caught(
        algorithm, 4, {Operation::broadcast, 8, 2}, "is read before it is there",
        [&](auto& plans) { plans = plans_of(algorithm, 4, {Operation::broadcast, 8, 1}); });
}
const Test kRoot{"mutant: the wrong root", root_test};

void given_away_test() {
  const Case gather{Operation::gather, 8, 1};
  expect_caught(Algorithm::direct, 4, gather,
                "rank 1, move 0: output element 16 is written before rank 0 has been heard of",
                [](auto& plans) {
                  for (collectives::Plan& plan : plans) plan.moves.erase(plan.moves.begin());
                  plans[1].moves.erase(plans[1].moves.begin(), plans[1].moves.begin() + 2);
                });
  expect_caught(Algorithm::direct, 4, gather, "rank 1, at the end: element 16: it is element 24",
                [](auto& plans) { std::swap(plans[1].moves[3].in, plans[1].moves[4].in); });
  expect_caught(Algorithm::direct, 4, {Operation::scatter, 8, 1},
                "rank 2, at the end: element 0: it is element 24",
                [](auto& plans) { std::swap(plans[1].moves[0].out, plans[1].moves[1].out); });
  expect_caught(Algorithm::direct, 4, {Operation::all_to_all, 8},
                "rank 2, at the end: element 0: it is element 24",
                [](auto& plans) { plans[0].moves[4].out.begin = 24; });
  expect_caught(
      Algorithm::direct, 4, {Operation::reduce, 8, 1},
      "rank 1, move 5: element 0: rank 2 is counted twice", [](auto& plans) {
        auto& moves = plans[1].moves;
        moves.insert(
            moves.end() - 1,
            {1, {collectives::Space::scratch, 16, 8}, 1, {collectives::Space::scratch, 8, 8}});
      });
}
const Test kGivenAway{"mutant: elements forwarded to the wrong place or too early",
                      given_away_test};

void copied_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "lacks rank",
                [](auto& plans) { plans[1].moves[0].combine = collectives::Combine::copy; });
}
const Test kCopied{"mutant: a copy instead of a sum", copied_test};

void bounds_test() {
  expect_caught(Algorithm::ring, 4, kReduce8, "`in` leaves its memory",
                [](auto& plans) { plans[1].scratch = 3; });
  expect_caught(Algorithm::ring, 4, kReduce8, "its peer is not in the group",
                [](auto& plans) { plans[1].moves[0].to = 4; });
  expect_caught(Algorithm::ring, 4, kReduce8, "it writes to the input",
                [](auto& plans) { plans[1].moves[0].in = plans[1].moves[0].with; });
  expect_caught(Algorithm::ring, 4, {Operation::all_reduce, 9}, "elements are due",
                [](auto& plans) { --plans[1].moves[4].out.count; });
}
const Test kBounds{"mutant: ranges and peers that do not exist", bounds_test};

}  // namespace
}  // namespace pycomm
