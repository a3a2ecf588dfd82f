// Plans in which every rank exchanges messages with every other directly. Step k sends to rank + k
// and receives from rank - k, so no two ranks send to the same rank in one step. The depth is one
// round trip, but every rank handles size - 1 messages: for small arrays and few ranks. Sums are
// folded in rank order, so their bits depend on the inputs alone.
#include <utility>

#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

int ahead(int rank, int size, int step) { return (rank + step) % size; }
int behind(int rank, int size, int step) { return (rank + size - step) % size; }

}  // namespace

Plan copy_plan(Range from, Range to) {
  Plan plan;
  plan.moves.push_back({0, from, 0, to});
  return plan;
}

void append_fold(Plan& plan, int rank, int size, const std::function<Range(int)>& part_of,
                 Range result) {
  const auto slot = [&](int i) {
    return Range{Space::scratch, static_cast<size_t>(i) * result.count, result.count};
  };
  plan.scratch = static_cast<size_t>(size) * result.count;
  plan.moves.push_back({rank, part_of(rank), rank, slot(rank)});
  for (int step = 1; step < size; ++step) {
    const int to = ahead(rank, size, step), from = behind(rank, size, step);
    plan.moves.push_back({to, part_of(to), from, slot(from)});
  }
  plan.moves.push_back({rank, {Space::scratch, 0, plan.scratch}, rank, result, Combine::fold});
}

// One phase. With three ranks and arrays a, b and c:
//
//           rank 0       rank 1       rank 2
//   copy    a to slot 0  b to slot 1  c to slot 2
//   step 1  a to rank 1  b to rank 2  c to rank 0    the receiver keeps it in the sender's slot
//   step 2  a to rank 2  b to rank 0  c to rank 1
//   fold    a + b + c    a + b + c    a + b + c      into the output
//
// Steps: size - 1. Elements sent: (size - 1) count.
Plan direct_all_reduce(int rank, int size, size_t count) {
  const Range input{Space::input, 0, count}, output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  Plan plan;
  append_fold(plan, rank, size, [&](int) { return input; }, output);
  return plan;
}

// With three ranks and root 0: the root sends to rank 1, then to rank 2.
//
// Steps: size - 1. Elements sent: (size - 1) count at the root, else 0.
Plan direct_broadcast(int rank, int size, size_t count, int root) {
  const Range whole{Space::output, 0, count};
  Plan plan;
  if (rank != root) plan.moves.push_back({kNoRank, {}, root, whole});
  for (int step = 1; rank == root && step < size; ++step)
    plan.moves.push_back({ahead(root, size, step), whole});
  return plan;
}

// With three ranks that hold a, b and c, after the announcement:
//
//           rank 0       rank 1       rank 2
//   step 1  a to rank 1  b to rank 2  c to rank 0    the receiver copies it to the sender's part
//   step 2  a to rank 2  b to rank 0  c to rank 1
//
// Steps: those of the announcement, plus size - 1; size - 1 with two ranks. Elements sent besides
// the announcement: (size - 1) times this rank's contribution.
Plan direct_all_gather(const CollectiveShape& at) {
  const auto [rank, size] = std::pair(at.rank, at.size);
  const auto place = [&](int i) { return part(Space::output, at.count, at.counts, i); };
  const Range input{Space::input, 0, place(rank).count};
  Plan plan;
  // With two ranks the data of the only peer is the announcement.
  if (size > 2) append_announcement(plan, rank, size);
  for (int step = 1; step < size; ++step) {
    const int from = behind(rank, size, step);
    plan.moves.push_back({ahead(rank, size, step), input, from, place(from)});
  }
  plan.moves.push_back({rank, input, rank, place(rank)});
  return plan;
}

// With three ranks, each holding parts for ranks 0, 1 and 2:
//
//           rank 0            rank 1            rank 2
//   copy    own to slot 0     own to slot 1     own to slot 2
//   step 1  part 1 to rank 1  part 2 to rank 2  part 0 to rank 0    kept in the sender's slot
//   step 2  part 2 to rank 2  part 0 to rank 0  part 1 to rank 1
//   fold    slots 0 + 1 + 2   slots 0 + 1 + 2   slots 0 + 1 + 2     into the output
//
// Steps: size - 1. Elements sent: (size - 1) count.
Plan direct_reduce_scatter(int rank, int size, size_t count) {
  const auto part = [&](int i) {
    return Range{Space::input, static_cast<size_t>(i) * count, count};
  };
  const Range output{Space::output, 0, count};
  if (size == 1) return copy_plan(part(0), output);
  Plan plan;
  append_fold(plan, rank, size, part, output);
  return plan;
}

// With three ranks that hold a, b and c, and root 0:
//
//           rank 0       rank 1       rank 2
//   copy    a to slot 0
//   step 1               b to rank 0                  kept in the sender's slot
//   step 2                            c to rank 0
//   fold    a + b + c                                 into the output
//
// Steps: size - 1. Elements sent: count, 0 at the root.
Plan direct_reduce(int rank, int size, size_t count, int root) {
  const Range input{Space::input, 0, count}, output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  Plan plan;
  if (rank != root) {
    plan.moves.push_back({root, input});
    return plan;
  }
  plan.scratch = static_cast<size_t>(size) * count;
  plan.moves.push_back({rank, input, rank, part(Space::scratch, count, {}, rank)});
  for (int step = 1; step < size; ++step) {
    const int from = ahead(rank, size, step);
    plan.moves.push_back({kNoRank, {}, from, part(Space::scratch, count, {}, from)});
  }
  plan.moves.push_back({rank, {Space::scratch, 0, plan.scratch}, rank, output, Combine::fold});
  return plan;
}

}  // namespace pycomm::collectives
