// Every plan, by name. Pure functions; choose.h picks among them and engine/ runs what they give.
//
// `count` is elements: of the array (all_reduce, reduce, broadcast), of one rank's input
// (all_gather, gather: the output is size * count), of one rank's output (reduce_scatter, scatter:
// the input is size * count), of what one rank sends another (all_to_all). Those that take a
// CollectiveShape use its `counts`.
//
// What holds for all of them, for every size and count (tests/native/prove.h proves it):
//   * No buffering is needed: a send may wait until its receiver has come to the matching receive.
//   * `input` and `output` may be one array; in all_gather and gather `input` may be this rank's
//     place in `output`, in reduce_scatter and scatter `output` this rank's place in `input`; in
//     all_to_all they share nothing.
//   * Reduce and gather write the root's output alone, and scatter reads the root's input alone.
//   * All ranks add an element in the same order and finish it once.
//   * Except in broadcast and scatter nothing is written to `output` before this rank has heard of
//     every other rank, through whatever chain of messages: who disagrees is noticed while arrays
//     are whole.
//   * A piece without elements is sent all the same: its header must be seen. Its sender waits for
//     nothing, so a message without elements says only that its sender has begun.
//   * A group of one copies.
#pragma once

#include <cstddef>
#include <functional>

#include "collectives/plan.h"

namespace pycomm {

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

Plan owner_all_reduce(int rank, int size, size_t count);

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

// What crosses between hosts of a hierarchical_all_reduce in blocks, for ranks that sum and spread
// inside their hosts by other means. `lanes` ranks of each host cut a block of `count` elements
// into equal pieces, by index. Before a block's moves, which end at `end`, a rank in a lane has the
// sum over its host of its piece in scratch, at `sum_at`, unless it is alone there; after them its
// piece of the output is finished. `sum_at` is the same again after kSumsAhead blocks.
struct InterHostPlan {
  struct Block {
    size_t begin, count;
    int lanes;
    size_t sum_at, end;
  };
  Plan plan;  // none outside lanes
  std::vector<Block> blocks;
};
inline constexpr size_t kSumsAhead = 2;
InterHostPlan cross_all_reduce(const CollectiveShape& at, size_t block);

Plan tree_all_reduce(int rank, int size, size_t count);
Plan tree_broadcast(int rank, int size, size_t count, int root);
Plan tree_reduce(int rank, int size, size_t count, int root);
Plan tree_gather(int rank, int size, size_t count, int root);
Plan tree_scatter(int rank, int size, size_t count, int root);
Plan tree_all_gather(int rank, int size, size_t count);
Plan tree_reduce_scatter(int rank, int size, size_t count);

// Parts that plans share, written in direct.cpp, barrier.cpp, ring.cpp and pipeline.cpp.

// The whole plan of a group of one.
Plan copy_plan(Range from, Range to);

// After its moves every rank has been heard of. Up to eight ranks: an empty message to and from
// every peer, in size - 1 steps. More: tokens.
void append_announcement(Plan& plan, int rank, int size);

// The same with one element to and from log2(size) peers, rounded up, in as many steps. Uses two
// elements of scratch, from 0 on.
void append_tokens(Plan& plan, int rank, int size);

// Sends `part_of(peer)` of the input to every peer and folds what came, this rank's own part with
// it, in rank order into `result`. Uses size * result.count elements of scratch.
void append_fold(Plan& plan, int rank, int size, const std::function<Range(int)>& part_of,
                 Range result);

// The pieces of the tree plans of reduce, broadcast and all_reduce. With more than one they are
// made of the two below, which take the pieces through a binary tree.
int tree_pieces(int size, size_t count);
void append_pipelined_reduce(Plan& plan, const CollectiveShape& at);
void append_pipelined_broadcast(Plan& plan, const CollectiveShape& at);

// ring_all_gather without the announcement: for parts of which each speaks for all ranks.
Plan ring_spread(const CollectiveShape& at);

// Pieces that a ring broadcast or reduce of `count` elements is cut into.
size_t ring_broadcast_pieces(int size, size_t count);

}  // namespace pycomm
