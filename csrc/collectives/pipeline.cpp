// Tree plans of large arrays, split into pieces that follow each other through a binary tree, so
// that all levels work concurrently. The chain in ring.cpp sends fewer bytes in more steps.
//
// The tree is binary, because a binomial root would send every piece log2(size) times; here it
// sends each twice. Two trees at once would send it once, but a rank has one order of sends, so two
// trees would wait for each other's slowest rank. Node i has the children 2 i + 1 and 2 i + 2;
// "levels" is the number of steps from the root down to the last node.
#include <bit>
#include <vector>

#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

// As in ring.cpp: a minimum piece size, and no more pieces than needed to hide the filling of the
// tree.
constexpr size_t kPiece = 16384;
constexpr size_t kPiecesPerLevel = 8;

struct Node {
  int node, size, root;

  explicit Node(const CollectiveShape& at)
      : node((at.rank - at.root + at.size) % at.size), size(at.size), root(at.root) {}

  int rank_of(int of) const { return (of + root) % size; }
  int parent() const { return rank_of((node - 1) / 2); }
  std::vector<int> children() const {
    std::vector<int> ranks;
    for (int child = 2 * node + 1; child <= 2 * node + 2 && child < size; ++child)
      ranks.push_back(rank_of(child));
    return ranks;
  }
};

}  // namespace

int tree_pieces(int size, size_t count) {
  if (size <= 4) return 1;  // a binomial root sends no more than twice
  const auto levels = static_cast<size_t>(std::bit_width(static_cast<unsigned>(size)) - 1);
  return static_cast<int>(std::max<size_t>(1, std::min(kPiecesPerLevel * levels, count / kPiece)));
}

// With three ranks, 1 and 2 under 0, and pieces a b:
//
//           rank 0       rank 1       rank 2
//   step 0               a to rank 0                  rank 0 adds, in scratch
//   step 1                            a to rank 0     rank 0 finishes, in the output
//   step 2               b to rank 0
//   step 3                            b to rank 0
void append_pipelined_reduce(Plan& plan, const CollectiveShape& at) {
  const Node me(at);
  const int pieces = tree_pieces(at.size, at.count);
  const auto children = me.children();
  const size_t longest = piece(Space::input, at.count, pieces, 0).count;
  for (int i = 0; i < pieces; ++i) {
    const Range own = piece(Space::input, at.count, pieces, i);
    const Range slot{Space::scratch, i % 2 == 0 ? 0 : longest, own.count};
    Range sum = own;
    for (const int child : children) {
      const bool last = me.node == 0 && child == children.back();
      plan.moves.push_back({kNoRank,
                            {},
                            child,
                            last ? piece(Space::output, at.count, pieces, i) : slot,
                            last ? Combine::finish : Combine::reduce,
                            sum});
      sum = slot;
    }
    if (me.node != 0) plan.moves.push_back({me.parent(), sum});
  }
  if (!children.empty()) plan.scratch = std::max(plan.scratch, 2 * longest);
}

// The reverse: each piece is received from the parent and is sent to both children.
void append_pipelined_broadcast(Plan& plan, const CollectiveShape& at) {
  const Node me(at);
  const int pieces = tree_pieces(at.size, at.count);
  for (int i = 0; i < pieces; ++i) {
    const Range part = piece(Space::output, at.count, pieces, i);
    if (me.node != 0) plan.moves.push_back({kNoRank, {}, me.parent(), part});
    for (const int child : me.children()) plan.moves.push_back({child, part});
  }
}

}  // namespace pycomm::collectives
