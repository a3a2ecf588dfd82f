// All-reduce in two phases: rank i reduces piece i and sends the result to all ranks.
#include "collectives/collectives.h"

namespace pycomm::collectives {

// With three ranks and pieces a b c:
//
//           rank 0       rank 1       rank 2
//   copy    a to slot 0  b to slot 1  c to slot 2
//   step 1  b to rank 1  c to rank 2  a to rank 0    the receiver keeps it in the sender's slot
//   step 2  c to rank 2  a to rank 0  b to rank 1
//   fold    a            b            c              slots 0 + 1 + 2, into the output
//   step 3  a to rank 1  b to rank 2  c to rank 0    the receiver copies
//   step 4  a to rank 2  b to rank 0  c to rank 1
//
// Steps: 2 (size - 1). Elements sent: count + (size - 2) piece(rank), about 2 count (size - 1) /
// size: as few as in a ring, but added in rank order, with one rounding.
Plan direct_two_phase_all_reduce(int rank, int size, size_t count) {
  if (size == 1) return copy_plan({Space::input, 0, count}, {Space::output, 0, count});
  const auto output_piece = [&](int i) { return piece(Space::output, count, size, i); };
  const auto input_piece = [&](int i) { return piece(Space::input, count, size, i); };
  Plan plan;
  append_fold(plan, rank, size, input_piece, output_piece(rank));
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size, from = (rank + size - step) % size;
    plan.moves.push_back({to, output_piece(rank), from, output_piece(from)});
  }
  return plan;
}

}  // namespace pycomm::collectives
