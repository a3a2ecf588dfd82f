// Plans along a binomial tree: log2(size) steps up or down, each with the whole array. For small
// arrays and many ranks.
//
// The parent of a node is the node with its lowest set bit cleared; its children are the node plus
// each power of two below that bit. The nodes of a subtree are consecutive, starting with its root:
//
//              0                  0 has the children 1, 2, 4
//          /   |   \              2 has the child 3
//         1    2     4            4 has the children 5, 6
//              |    / \           6 has the child 7
//              3   5   6
//                      |
//                      7
//
// "log" below is log2(size) rounded up, "children" the number of this rank's children, "under" the
// number of nodes in a node's subtree, itself included.
#include <vector>

#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

int parent_of(int node) { return node & (node - 1); }

// In ascending order, which is also the order of subtree sizes.
std::vector<int> children_of(int node, int size) {
  std::vector<int> children;
  for (int bit = 1; (node & bit) == 0 && node + bit < size; bit *= 2)
    children.push_back(node + bit);
  return children;
}

size_t under(int node, int size) {
  const int bit = node & -node;  // 0 for the root
  return static_cast<size_t>(node == 0 ? size : std::min(bit, size - node));
}

// A node of the tree whose node 0 is rank `root`.
struct Tree {
  int node, size, root;
  int rank_of(int of) const { return (of + root) % size; }
  // The parts of the subtree of node `of`, in scratch that begins with those of `node`.
  Range run(int of, size_t count) const {
    return {Space::scratch, static_cast<size_t>(of - node) * count, under(of, size) * count};
  }
};

// Reduces `input` of all nodes to the root, which finishes it into `result`. The others reduce in
// scratch, from offset 0.
void append_reduce(Plan& plan, const CollectiveShape& at, Range input, Range result) {
  const Range scratch{Space::scratch, 0, input.count};
  const int node = (at.rank - at.root + at.size) % at.size;
  const auto rank_of = [&](int of) { return (of + at.root) % at.size; };
  const auto children = children_of(node, at.size);
  Range sum = input;
  for (const int child : children) {
    const bool last = node == 0 && child == children.back();
    plan.moves.push_back({kNoRank,
                          {},
                          rank_of(child),
                          last ? result : scratch,
                          last ? Combine::finish : Combine::reduce,
                          sum});
    sum = scratch;
  }
  if (node != 0) plan.moves.push_back({rank_of(parent_of(node)), sum});
  if (!children.empty()) plan.scratch = std::max(plan.scratch, input.count);
}

// Sends `whole` down from the root, the largest subtree first. The root reads it from `source`.
void append_broadcast(Plan& plan, int rank, int size, Range source, Range whole, int root = 0) {
  const int node = (rank - root + size) % size;
  const auto rank_of = [&](int of) { return (of + root) % size; };
  if (node != 0) plan.moves.push_back({kNoRank, {}, rank_of(parent_of(node)), whole});
  const auto children = children_of(node, size);
  for (auto child = children.rbegin(); child != children.rend(); ++child)
    plan.moves.push_back({rank_of(*child), node == 0 ? source : whole});
}

}  // namespace

// Up the tree, then down. With three ranks:
//
//           rank 0                rank 1         rank 2
//   step 0                        sends to 0                    rank 0 adds, in scratch
//   step 1                                       sends to 0     rank 0 finishes, in the output
//   step 2  sends the sum to 2
//   step 3  sends the sum to 1
//
// Steps: 2 log. Messages: children, plus 1 except at rank 0; each of count elements. Large arrays
// are split into pieces along a binary tree: at most 4 pieces + 5 log steps, and up to 3 count
// elements.
Plan tree_all_reduce(int rank, int size, size_t count) {
  const Range input{Space::input, 0, count}, output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  Plan plan;
  const CollectiveShape at{.rank = rank, .size = size, .count = count};
  if (tree_pieces(size, count) > 1) {
    append_pipelined_reduce(plan, at);
    append_pipelined_broadcast(plan, at);
    return plan;
  }
  append_reduce(plan, at, input, output);
  append_broadcast(plan, rank, size, output, output);
  return plan;
}

// Node i is rank root + i. With three ranks and root 0: rank 0 sends to rank 2, then to rank 1.
//
// Steps: log. Messages: children, each of count elements. Large arrays are split into pieces along
// a binary tree: at most 2 pieces + 2 log steps, and up to 2 count elements.
Plan tree_broadcast(int rank, int size, size_t count, int root) {
  const Range whole{Space::output, 0, count};
  Plan plan;
  if (tree_pieces(size, count) > 1)
    append_pipelined_broadcast(plan, {.rank = rank, .size = size, .count = count, .root = root});
  else
    append_broadcast(plan, rank, size, whole, whole, root);
  return plan;
}

// The first half of the all-reduce, to the root, which is node 0.
//
// Steps: log. Messages: 1 of count elements, none at the root. Large arrays are split into pieces
// along a binary tree: at most 2 pieces + 3 log steps.
Plan tree_reduce(int rank, int size, size_t count, int root) {
  const Range input{Space::input, 0, count}, output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  Plan plan;
  const CollectiveShape at{.rank = rank, .size = size, .count = count, .root = root};
  if (tree_pieces(size, count) > 1)
    append_pipelined_reduce(plan, at);
  else
    append_reduce(plan, at, input, output);
  return plan;
}

// Inputs are gathered up the tree in scratch, and the whole is sent down. With three ranks that
// hold a, b, c:
//
//           rank 0           rank 1        rank 2
//   copy    a to scratch
//   step 0                   b to rank 0                  rank 0 appends, in scratch
//   step 1                                 c to rank 0
//   step 2  a b c to rank 2                               the receiver copies, in the output
//   step 3  a b c to rank 1
//
// Scratch instead of the output, because rank 0 has a message from every rank only after the last
// arrives. An announcement would need an empty message for every pair of ranks.
//
// Steps: 2 log. Messages: as in the all-reduce. Elements sent: under * count up (none at rank 0)
// and children * size * count down.
Plan tree_all_gather(int rank, int size, size_t count) {
  const Range input{Space::input, 0, count};
  const Range output{Space::output, 0, static_cast<size_t>(size) * count};
  if (size == 1) return copy_plan(input, output);
  const auto children = children_of(rank, size);
  Range run = input;
  Plan plan;
  if (!children.empty()) {
    run = {Space::scratch, 0, under(rank, size) * count};
    plan.scratch = run.count;
    plan.moves.push_back({rank, input, rank, {Space::scratch, 0, count}});
  }
  for (const int child : children) {
    const auto offset = static_cast<size_t>(child - rank) * count;
    plan.moves.push_back(
        {kNoRank, {}, child, {Space::scratch, offset, under(child, size) * count}});
  }
  if (rank != 0) plan.moves.push_back({parent_of(rank), run});
  append_broadcast(plan, rank, size, run, output);
  if (rank == 0) plan.moves.push_back({rank, run, rank, output});
  return plan;
}

// The first half of the all-gather, to the root, which is node 0; scratch has the parts in the
// order of the nodes. With three ranks that hold a, b, c, and root 0:
//
//           rank 0           rank 1        rank 2
//   copy    a to scratch
//   step 0                   b to rank 0                  rank 0 appends, in scratch
//   step 1                                 c to rank 0
//   copy    a b c                                         to the output
//
// Steps: log. Messages: 1 of under * count elements, none at the root.
Plan tree_gather(int rank, int size, size_t count, int root) {
  const Tree tree{(rank - root + size) % size, size, root};
  const Range input{Space::input, 0, count};
  Plan plan;
  Range run = input;
  const auto children = children_of(tree.node, size);
  if (tree.node == 0 || !children.empty()) {
    run = tree.run(tree.node, count);
    plan.scratch = run.count;
    plan.moves.push_back({rank, input, rank, {Space::scratch, 0, count}});
  }
  for (const int child : children)
    plan.moves.push_back({kNoRank, {}, tree.rank_of(child), tree.run(child, count)});
  if (tree.node != 0) plan.moves.push_back({tree.rank_of(parent_of(tree.node)), run});
  for (int i = 0; tree.node == 0 && i < size; ++i)
    plan.moves.push_back({rank, part(Space::scratch, count, {}, i), rank,
                          part(Space::output, count, {}, tree.rank_of(i))});
  return plan;
}

// The reverse: the root copies its parts to scratch in the order of the nodes, and each subtree
// receives its run. With three ranks, root 0 and parts a b c:
//
//           rank 0       rank 1      rank 2
//   copy    a b c                               to scratch
//   step 0  c to rank 2                         directly to the output: rank 2 is a leaf
//   step 1  b to rank 1
//   copy    a                                   to the output
//
// Steps: log. Elements sent: (under - 1) * count.
Plan tree_scatter(int rank, int size, size_t count, int root) {
  const Tree tree{(rank - root + size) % size, size, root};
  const Range output{Space::output, 0, count}, first{Space::scratch, 0, count};
  Plan plan;
  const auto children = children_of(tree.node, size);
  const bool inner = tree.node == 0 || !children.empty();
  const Range run = tree.run(tree.node, count);
  if (inner) plan.scratch = run.count;
  for (int i = 0; tree.node == 0 && i < size; ++i)
    plan.moves.push_back({rank, part(Space::input, count, {}, tree.rank_of(i)), rank,
                          part(Space::scratch, count, {}, i)});
  if (tree.node != 0)
    plan.moves.push_back({kNoRank, {}, tree.rank_of(parent_of(tree.node)), inner ? run : output});
  for (auto child = children.rbegin(); child != children.rend(); ++child)
    plan.moves.push_back({tree.rank_of(*child), tree.run(*child, count)});
  if (inner) plan.moves.push_back({rank, first, rank, output});
  return plan;
}

// All inputs are reduced up the tree in scratch, and each subtree receives its run of the sum. With
// three ranks and parts a b c of the sum:
//
//           rank 0       rank 1         rank 2
//   step 0               sends to 0                    rank 0 adds, in scratch
//   step 1                              sends to 0     rank 0 finishes, in scratch
//   step 2  c to rank 2                                directly to the output: rank 2 is a leaf
//   step 3  b to rank 1
//   copy    a
//
// Steps: 2 log. Messages: as in the all-reduce. Elements sent: size * count up (none at rank 0) and
// (under - 1) * count down.
Plan tree_reduce_scatter(int rank, int size, size_t count) {
  const Range input{Space::input, 0, static_cast<size_t>(size) * count};
  const Range output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  const auto children = children_of(rank, size);
  const Range run{Space::scratch, 0, under(rank, size) * count};
  Plan plan;
  append_reduce(plan, {.rank = rank, .size = size}, input, {Space::scratch, 0, input.count});
  if (rank != 0)
    plan.moves.push_back({kNoRank, {}, parent_of(rank), children.empty() ? output : run});
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    const auto offset = static_cast<size_t>(*child - rank) * count;
    plan.moves.push_back({*child, {Space::scratch, offset, under(*child, size) * count}});
  }
  if (!children.empty()) plan.moves.push_back({rank, {Space::scratch, 0, count}, rank, output});
  return plan;
}

}  // namespace pycomm::collectives
