// Plans along a ring: every rank sends to its right neighbour only. Each sends the fewest bytes
// possible, in a number of steps that grows with the size: for large arrays.
#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

using PartOf = std::function<Range(int)>;

// Minimum piece of a broadcast or a reduce, so that its transfer time exceeds the cost of a header
// and a wake-up: 64 KiB of float32.
constexpr size_t kBroadcastPiece = 16384;

// Pieces per hop of a broadcast or a reduce: filling the chain then takes at most an eighth of the
// time.
constexpr size_t kPiecesPerHop = 8;

int right_of(int rank, int size) { return (rank + 1) % size; }
int left_of(int rank, int size) { return (rank + size - 1) % size; }

// Part i of the input passes once around the ring, from rank i+1 to rank i, and every rank adds its
// own; rank i finishes it into `result`. Two scratch slots alternate: one is sent while the other
// is filled.
void append_reduce_round(Plan& plan, int rank, int size, const PartOf& input_part, Range result) {
  size_t place = 0;
  for (int i = 0; i < size; ++i) place = std::max(place, input_part(i).count);
  Range sent = input_part(rank - 1);
  for (int step = 0; step < size - 1; ++step) {
    const Range mine = input_part(rank - step - 2);
    const bool last = step == size - 2;
    const Range sum{Space::scratch, step % 2 == 0 ? 0 : place, mine.count};
    plan.moves.push_back({right_of(rank, size), sent, left_of(rank, size), last ? result : sum,
                          last ? Combine::finish : Combine::reduce, mine});
    sent = sum;
  }
  plan.scratch = static_cast<size_t>(std::clamp(size - 2, 0, 2)) * place;
}

// Part i of the output passes once around the ring, from rank i to rank i-1. `first` is the range
// of this rank's own part.
void append_gather_round(Plan& plan, int rank, int size, Range first, const PartOf& output_part) {
  for (int step = 0; step < size - 1; ++step)
    plan.moves.push_back({right_of(rank, size), step == 0 ? first : output_part(rank - step),
                          left_of(rank, size), output_part(rank - step - 1)});
}

}  // namespace

// Reduce-scatter, then all-gather. With three ranks and pieces a b c:
//
//             rank 0      rank 1      rank 2
//   reduce 0  sends c     sends a     sends b      the receiver adds, in scratch
//   reduce 1  sends b     sends c     sends a      the receiver finishes, in the output
//   gather 0  sends a     sends b     sends c      the receiver copies
//   gather 1  sends c     sends a     sends b
//
// Steps: 2 (size - 1). Elements sent: 2 count - piece(rank) - piece(rank + 1), about
// 2 count (size - 1) / size.
Plan ring_all_reduce(int rank, int size, size_t count) {
  if (size == 1) return copy_plan({Space::input, 0, count}, {Space::output, 0, count});
  const auto part = [&](Space space, int i) { return piece(space, count, size, i); };
  const Range own = part(Space::output, rank);
  Plan plan;
  append_reduce_round(plan, rank, size, [&](int i) { return part(Space::input, i); }, own);
  append_gather_round(plan, rank, size, own, [&](int i) { return part(Space::output, i); });
  return plan;
}

size_t ring_broadcast_pieces(int size, size_t count) {
  const size_t hops = size > 2 ? static_cast<size_t>(size) - 2 : 0;  // after the first
  return std::max<size_t>(1, std::min(kPiecesPerHop * hops, count / kBroadcastPiece));
}

// A chain from the root to its left neighbour; a rank forwards one piece while it receives the
// next. With three ranks, root 0 and pieces a b:
//
//           rank 0      rank 1      rank 2
//   step 0  sends a
//   step 1  sends b     sends a
//   step 2              sends b
//
// Steps: pieces + size - 2. Elements sent: count, 0 at the last rank.
Plan ring_broadcast(int rank, int size, size_t count, int root) {
  const auto pieces = static_cast<int>(ring_broadcast_pieces(size, count));
  const int right = right_of(rank, size);
  Plan plan;
  for (int i = 0; i < pieces; ++i) {
    const Range part = piece(Space::output, count, pieces, i);
    if (rank != root) plan.moves.push_back({kNoRank, {}, left_of(rank, size), part});
    if (right != root) plan.moves.push_back({right, part});
  }
  return plan;
}

// A reduce along the chain, from the root's right neighbour around to the root; each rank adds its
// own. With three ranks, root 0 and pieces a b:
//
//           rank 0      rank 1      rank 2
//   step 0              sends a
//   step 1              sends b     sends a      rank 2 adds, in scratch, and forwards
//   step 2                          sends b      rank 0 finishes, in the output
//
// Steps: pieces + size - 2. Elements sent: count, 0 at the root.
Plan ring_reduce(int rank, int size, size_t count, int root) {
  if (size == 1) return copy_plan({Space::input, 0, count}, {Space::output, 0, count});
  const auto pieces = static_cast<int>(ring_broadcast_pieces(size, count));
  const int right = right_of(rank, size), left = left_of(rank, size);
  const bool adds = left != root;
  Plan plan;
  for (int i = 0; i < pieces; ++i) {
    const Range own = piece(Space::input, count, pieces, i);
    const size_t longest = piece(Space::input, count, pieces, 0).count;
    const Range sum{Space::scratch, i % 2 == 0 ? 0 : longest, own.count};
    if (rank == root) {
      plan.moves.push_back(
          {kNoRank, {}, left, piece(Space::output, count, pieces, i), Combine::finish, own});
      continue;
    }
    if (adds) plan.moves.push_back({kNoRank, {}, left, sum, Combine::reduce, own});
    plan.moves.push_back({right, adds ? sum : own});
    if (adds) plan.scratch = std::max(plan.scratch, sum.begin + sum.count);
  }
  return plan;
}

// With three ranks that hold a, b and c, after the announcement:
//
//           rank 0      rank 1      rank 2
//   step 0  sends a     sends b     sends c      the receiver copies
//   step 1  sends c     sends a     sends b
//
// Steps: those of the announcement, plus size - 1; size - 1 with two ranks. Elements sent besides
// the announcement: all parts except the right neighbour's, (size - 1) count.
Plan ring_all_gather(const CollectiveShape& at) {
  Plan plan;
  // With two ranks the data of the only peer is the announcement.
  if (at.size > 2) append_announcement(plan, at.rank, at.size);
  const Plan round = ring_all_gather_stage(at);
  plan.moves.insert(plan.moves.end(), round.moves.begin(), round.moves.end());
  return plan;
}

Plan ring_all_gather_stage(const CollectiveShape& at) {
  const auto place = [&at](int i) {
    return part(Space::output, at.count, at.counts, (i + at.size) % at.size);
  };
  const Range input{Space::input, 0, place(at.rank).count};
  Plan plan;
  append_gather_round(plan, at.rank, at.size, input, place);
  plan.moves.push_back({at.rank, input, at.rank, place(at.rank)});
  return plan;
}

// The first half of the all-reduce:
//
//           rank 0      rank 1      rank 2
//   step 0  sends c     sends a     sends b      the receiver adds, in scratch
//   step 1  sends b     sends c     sends a      the receiver finishes its own, in the output
//
// Steps: size - 1. Elements sent: (size - 1) count.
Plan ring_reduce_scatter(const CollectiveShape& at) {
  const auto place = [&at](int i) {
    return part(Space::input, at.count, at.counts, (i + at.size) % at.size);
  };
  const Range output{Space::output, 0, place(at.rank).count};
  if (at.size == 1) return copy_plan(place(0), output);
  Plan plan;
  append_reduce_round(plan, at.rank, at.size, place, output);
  return plan;
}

}  // namespace pycomm::collectives
