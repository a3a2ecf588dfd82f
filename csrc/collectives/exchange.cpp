// Gather, scatter and all-to-all by direct messages: no element is sent twice, but the root, or
// every rank, handles size - 1 messages. tree.cpp has gather and scatter along a tree.
#include "collectives/collectives.h"

namespace pycomm::collectives {

// With three ranks that hold a, b and c, and root 0:
//
//           rank 0       rank 1           rank 2
//   step 1               empty to 0                        the root receives from all ranks
//   step 2                                empty to 0
//   step 3               b to rank 0                       directly to its place
//   step 4                                c to rank 0
//   copy    a
//
// Steps: 2 (size - 1), the first half of them empty; 1 with two ranks. Elements sent: count, 0 at
// the root.
Plan direct_gather(int rank, int size, size_t count, int root) {
  const Range input{Space::input, 0, count};
  const auto place = [&](int i) { return part(Space::output, count, {}, i); };
  Plan plan;
  const bool announces = size > 2;  // with two ranks the data is the announcement
  if (rank != root) {
    if (announces) plan.moves.push_back({root, {}});
    plan.moves.push_back({root, input});
    return plan;
  }
  for (int step = 1; announces && step < size; ++step)
    plan.moves.push_back({kNoRank, {}, (root + step) % size, {}});
  for (int step = 1; step < size; ++step) {
    const int from = (root + step) % size;
    plan.moves.push_back({kNoRank, {}, from, place(from)});
  }
  plan.moves.push_back({rank, input, rank, place(rank)});
  return plan;
}

// With three ranks and root 0: the root sends part 1 to rank 1, then part 2 to rank 2, and copies
// part 0.
//
// Steps: size - 1. Elements sent: (size - 1) count at the root, else 0.
Plan direct_scatter(int rank, int size, size_t count, int root) {
  const Range output{Space::output, 0, count};
  Plan plan;
  if (rank != root) {
    plan.moves.push_back({kNoRank, {}, root, output});
    return plan;
  }
  for (int step = 1; step < size; ++step) {
    const int to = (root + step) % size;
    plan.moves.push_back({to, part(Space::input, count, {}, to)});
  }
  plan.moves.push_back({rank, part(Space::input, count, {}, rank), rank, output});
  return plan;
}

// With three ranks, after the announcement; "part 1" is the one for rank 1:
//
//           rank 0            rank 1            rank 2
//   step 1  part 1 to rank 1  part 2 to rank 2  part 0 to rank 0    to the sender's place
//   step 2  part 2 to rank 2  part 0 to rank 0  part 1 to rank 1
//   copy    part 0            part 1            part 2
//
// Steps: those of the announcement, plus size - 1; size - 1 with two ranks. Elements sent besides
// the announcement: all parts except this rank's own.
Plan direct_all_to_all(const CollectiveShape& at) {
  const auto size = static_cast<size_t>(at.size);
  const bool even = at.counts.empty();
  const auto send_counts = even ? at.counts : at.counts.first(size);
  const auto recv_counts = even ? at.counts : at.counts.subspan(size, size);
  const auto out = [&](int i) { return part(Space::input, at.count, send_counts, i); };
  const auto in = [&](int i) { return part(Space::output, at.count, recv_counts, i); };
  Plan plan;
  if (at.size > 2) append_announcement(plan, at.rank, at.size);
  for (int step = 1; step < at.size; ++step) {
    const int to = (at.rank + step) % at.size, from = (at.rank + at.size - step) % at.size;
    plan.moves.push_back({to, out(to), from, in(from)});
  }
  plan.moves.push_back({at.rank, out(at.rank), at.rank, in(at.rank)});
  return plan;
}

}  // namespace pycomm::collectives
