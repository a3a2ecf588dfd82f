// Plans without data: barriers, and the announcements at the start of other plans, after which
// these may write to the output.
//
// An empty message only signals that its sender has begun, because its send waits for nothing. A
// message on behalf of several ranks is a token, one element of scratch: its send waits for the
// receives before it.
#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

// Up to this many ranks one step with size - 1 empty messages is assumed to be faster than
// log2(size) steps.
constexpr int kFewRanks = 8;

}  // namespace

void append_tokens(Plan& plan, int rank, int size) {
  const auto slot = [](int step) {
    return Range{Space::scratch, static_cast<size_t>(step % 2), 1};
  };
  if (size > 1) plan.moves.push_back({rank, {}, rank, slot(0)});
  for (int step = 0, skip = 1; skip < size; ++step, skip *= 2)
    plan.moves.push_back(
        {(rank + skip) % size, slot(step), (rank + size - skip) % size, slot(step + 1)});
  plan.scratch = std::max<size_t>(plan.scratch, size > 1 ? 2 : 0);
}

void append_announcement(Plan& plan, int rank, int size) {
  if (size > kFewRanks) return append_tokens(plan, rank, size);
  for (int step = 1; step < size; ++step)
    plan.moves.push_back({(rank + step) % size, {}, (rank + size - step) % size, {}});
}

// An empty message to and from every peer.
//
// Steps: size - 1. Elements sent: 0.
Plan direct_barrier(int rank, int size) {
  Plan plan;
  for (int step = 1; step < size; ++step)
    plan.moves.push_back({(rank + step) % size, {}, (rank + size - step) % size, {}});
  return plan;
}

// Tokens only. With three ranks:
//
//           rank 0       rank 1       rank 2
//   step 1  to rank 1    to rank 2    to rank 0
//   step 2  to rank 2    to rank 0    to rank 1    includes the signal of step 1
//
// Steps: log2(size), rounded up. Elements sent: one per step.
Plan halving_barrier(int rank, int size) {
  Plan plan;
  append_tokens(plan, rank, size);
  return plan;
}

}  // namespace pycomm::collectives
