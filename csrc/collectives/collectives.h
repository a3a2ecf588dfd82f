// Every plan, by name. Pure functions; choose.h selects one and engine/ runs it.
//
// `count` is the number of elements of: the array (all_reduce, reduce, broadcast); one rank's input
// (all_gather, gather: the output is size * count); one rank's output (reduce_scatter, scatter: the
// input is size * count); one rank's message to another (all_to_all). Plans that take a
// CollectiveShape use its `counts`.
//
// Guarantees of all plans, for every size and count (tests/native/prove.h checks them):
//   * No buffering is needed: a send may block until the receiver posts the matching receive.
//   * `input` and `output` may be one array. In all_gather and gather `input` may be this rank's
//     part of `output`; in reduce_scatter and scatter `output` may be this rank's part of `input`.
//     In all_to_all they must not overlap.
//   * Reduce and gather write only the root's output, and scatter reads only the root's input.
//   * All ranks add an element in the same order and finish it once.
//   * Except in broadcast and scatter, a rank writes to `output` only after a chain of messages
//     from every other rank has reached it. So a mismatch is detected before an array changes.
//   * A piece without elements is sent too, because its header must be checked. Its sender waits
//     for nothing, so such a message only signals that its sender has begun the call.
//   * With one rank the plan is a copy.
#pragma once

#include <cstddef>
#include <functional>

#include "collectives/plan.h"

namespace pycomm::collectives {

Plan ring_all_reduce(int rank, int size, size_t count);
Plan ring_broadcast(int rank, int size, size_t count, int root);
Plan ring_all_gather(const CollectiveShape& at);
Plan ring_reduce_scatter(const CollectiveShape& at);
Plan ring_reduce(int rank, int size, size_t count, int root);

Plan direct_all_reduce(int rank, int size, size_t count);
Plan direct_broadcast(int rank, int size, size_t count, int root);
Plan direct_all_gather(const CollectiveShape& at);
Plan direct_reduce_scatter(int rank, int size, size_t count);
Plan direct_barrier(int rank, int size);
Plan direct_reduce(int rank, int size, size_t count, int root);
Plan direct_gather(int rank, int size, size_t count, int root);
Plan direct_scatter(int rank, int size, size_t count, int root);
Plan direct_all_to_all(const CollectiveShape& at);

Plan direct_two_phase_all_reduce(int rank, int size, size_t count);

Plan halving_all_reduce(int rank, int size, size_t count);
Plan halving_all_gather(const CollectiveShape& at);
Plan halving_reduce_scatter(const CollectiveShape& at);
Plan halving_barrier(int rank, int size);

Plan hierarchical_all_reduce(const CollectiveShape& at);
Plan hierarchical_broadcast(const CollectiveShape& at);
Plan hierarchical_reduce(const CollectiveShape& at);
Plan hierarchical_all_gather(const CollectiveShape& at);
Plan hierarchical_reduce_scatter(const CollectiveShape& at);
Plan hierarchical_barrier(const CollectiveShape& at);

// The messages between hosts of a hierarchical_all_reduce, in blocks, for ranks that sum and
// broadcast inside their hosts by other means. The `lanes` ranks of each host split a block of
// `count` elements into equal pieces, by index. Before the moves of a block, a rank in a lane has
// the sum over its host of its piece in scratch at `sum_at`; a rank that is alone on its host needs
// none. After the moves, which end at `end`, its piece of the output is finished. `sum_at` repeats
// after kSumsAhead blocks.
struct InterHostPlan {
  struct Block {
    size_t begin, count;
    int lanes;
    size_t sum_at, end;
  };
  Plan plan;  // empty for a rank in no lane
  std::vector<Block> blocks;
};
inline constexpr size_t kSumsAhead = 2;
InterHostPlan inter_host_all_reduce(const CollectiveShape& at, size_t block);

Plan tree_all_reduce(int rank, int size, size_t count);
Plan tree_broadcast(int rank, int size, size_t count, int root);
Plan tree_reduce(int rank, int size, size_t count, int root);
Plan tree_gather(int rank, int size, size_t count, int root);
Plan tree_scatter(int rank, int size, size_t count, int root);
Plan tree_all_gather(int rank, int size, size_t count);
Plan tree_reduce_scatter(int rank, int size, size_t count);

// Building blocks of several plans, in direct.cpp, barrier.cpp, ring.cpp and pipeline.cpp.

// The whole plan of a group of one.
Plan copy_plan(Range from, Range to);

// After its moves a rank has received a message from every rank, direct or indirect. Up to eight
// ranks: an empty message to and from every peer, in size - 1 steps. More: tokens.
void append_announcement(Plan& plan, int rank, int size);

// The same with one element to and from log2(size) peers, rounded up, in as many steps. Uses
// scratch elements 0 and 1.
void append_tokens(Plan& plan, int rank, int size);

// Sends `part_of(peer)` of the input to every peer, and folds the received parts and this rank's
// own in rank order into `result`. Uses size * result.count elements of scratch.
void append_fold(Plan& plan, int rank, int size, const std::function<Range(int)>& part_of,
                 Range result);

// Number of pieces in the tree plans of reduce, broadcast and all_reduce. With more than one piece
// they use the two pipelined plans below, along a binary tree.
int tree_pieces(int size, size_t count);
void append_pipelined_reduce(Plan& plan, const CollectiveShape& at);
void append_pipelined_broadcast(Plan& plan, const CollectiveShape& at);

// ring_all_gather without the announcement: for stages in which each rank represents several.
Plan ring_all_gather_stage(const CollectiveShape& at);

// Number of pieces of a ring broadcast or reduce of `count` elements.
size_t ring_broadcast_pieces(int size, size_t count);

}  // namespace pycomm::collectives
