// Proves plans: runs those of all ranks in one thread on symbols, with no buffer, thread or clock.
//
// A place of memory holds an expression over ranks, such as (0 + 2) + 1, and the number of its
// element. Sums are commutative here and never associative, as floating point
// is, so two ranks whose expressions differ could hold different bits. A whole run of elements that
// share an expression is one entry: the cost of a proof depends on the moves, hardly on the count.
//
// The run is that of an engine without buffers: a send ends only when its receiver has reached
// the matching receive, sends and receives each keep their order, a send
// waits for the moves before it that write what it reads, and a write for the sends before it that
// read what it overwrites, or would if input and output were one array. The order of
// ranks changes nothing, so one run proves all.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "collectives/plan.h"
#include "core/operation.h"

namespace pycomm {

struct Case {
  Operation operation = Operation::all_reduce;
  size_t count = 0;  // as in collectives.h
  int root = 0;
  // The caller passes one array: input is output, or this rank's place in the larger of the two.
  bool aliased = false;
  // Empty, or: all_gather: elements that each rank gives; all_to_all: those that rank r gives rank
  // q at [r * size + q].
  std::vector<size_t> counts{};
  std::vector<int> hosts{};  // by rank, or empty: one host
};

struct Proof {
  std::string error;             // the first violation, with rank, move and element; empty: proven
  std::vector<size_t> messages;  // that each rank sends to others
  std::vector<size_t> elements;  // in them
  size_t crossed = 0;            // elements, of all ranks together, that went to another host
  int steps = 0;                 // when a rank can send one message and receive one at a time
  bool folded = true;            // every sum is the fold of ranks 0, 1, 2, ... in this order
};

// plans[r] is rank r's; at most 64 ranks. Proven is, beside the order of things told above, that
//   * the operation's result is in every output: each rank's contribution once, finished once (with
//     two ranks or more), the same expression on all ranks;
//   * nothing is read before it is there, no range leaves its memory, input is never written, and
//     `in` overlaps neither `out` nor, unless they are the same place, `with`;
//   * output is written only by a rank that has heard of all ranks, through any chain of messages
//     (not in broadcast and scatter); after a barrier every rank has.
Proof prove(const std::vector<collectives::Plan>& plans, const Case& what);

}  // namespace pycomm
