// Plans by recursive halving and doubling: as few bytes as a ring in log2(size) steps, for any
// size. For middle-sized arrays and many ranks. Every array is copied to scratch and back, so that
// the data of one step is contiguous.
//
// A rank keeps its parts rotated: place i holds part rank + i (modulo size). "Skips" are size
// halved repeatedly, rounded up, down to 1: for five ranks 3, 2, 1. Reduce-scatter, with the skip s
// and the one before it t (at first the size): a rank sends places s to t to rank + s. It adds the
// data from rank - s, which is for the same parts, to its own places from 0 on, and is then
// responsible for s parts. All-gather is the reverse. A rank needs to know only ranks a skip away.
// After J. L. Traff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024; the
// all-gather is Bruck's.
//
// "log" below is log2(size) rounded up, the number of skips.
#include <algorithm>
#include <vector>

#include "collectives/collectives.h"

namespace pycomm::collectives {
namespace {

using PartOf = std::function<Range(int)>;

// The skips of `size`, ascending, then `size` itself.
std::vector<int> skips_of(int size) {
  std::vector<int> skips{size};
  while (skips.back() > 1) skips.push_back((skips.back() + 1) / 2);
  std::ranges::reverse(skips);
  return skips;
}

// The places of one rank in scratch, from 0 on, each as long as its part.
class Rotated {
 public:
  Rotated(Plan& plan, int rank, int size, const PartOf& part_of)
      : plan_(plan), rank_(rank), size_(size), skips_(skips_of(size)), part_of_(part_of) {
    begins_.push_back(0);
    for (int i = 0; i < size; ++i) begins_.push_back(begins_.back() + part(i).count);
    plan.scratch = std::max(plan.scratch, begins_.back());
  }

  // Places `first` to `end`.
  Range run(int first, int end) const {
    const size_t begin = begins_[static_cast<size_t>(first)];
    return {Space::scratch, begin, begins_[static_cast<size_t>(end)] - begin};
  }

  // One move for each part, because the parts need not be contiguous in a block of a larger call.
  void copy_in() const {
    for (int i = 0; i < size_; ++i) plan_.moves.push_back({rank_, part(i), rank_, run(i, i + 1)});
  }
  void copy_out() const {
    for (int i = 0; i < size_; ++i) plan_.moves.push_back({rank_, run(i, i + 1), rank_, part(i)});
  }

  // Leaves part `rank`, finished, in `result`.
  void reduce(Range result) const {
    for (size_t k = skips_.size() - 1; k > 0; --k) {
      const int skip = skips_[k - 1], before = skips_[k];
      const Range sum = run(0, before - skip);
      plan_.moves.push_back({ahead(skip), run(skip, before), ahead(-skip), k == 1 ? result : sum,
                             k == 1 ? Combine::finish : Combine::reduce, sum});
    }
  }

  // Needs part `rank` at place 0; afterwards all parts are in place.
  void gather() const {
    for (size_t k = 1; k < skips_.size(); ++k) {
      const int skip = skips_[k - 1], next = skips_[k];
      plan_.moves.push_back({ahead(-skip), run(0, next - skip), ahead(skip), run(skip, next)});
    }
  }

 private:
  int ahead(int by) const { return (rank_ + by + size_) % size_; }
  Range part(int place) const { return part_of_(ahead(place)); }

  Plan& plan_;
  int rank_, size_;
  std::vector<int> skips_;
  PartOf part_of_;
  std::vector<size_t> begins_;
};

}  // namespace

// Reduce-scatter, then all-gather. With three ranks (skips 2 and 1) and pieces a b c:
//
//           rank 0        rank 1        rank 2
//   copy    a b c         b c a         c a b         to scratch, the own piece first
//   step 1  c to rank 2   a to rank 0   b to rank 1   the receiver adds it to its own
//   step 2  b to rank 1   c to rank 2   a to rank 0   the receiver finishes its own
//   step 3  a to rank 2   b to rank 0   c to rank 1   the receiver keeps it at place 1
//   step 4  a to rank 1   b to rank 2   c to rank 0   at place 2
//   copy    a b c         b c a         c a b         to the output
//
// Steps: 2 log. Elements sent: count - piece(rank) in the reduce-scatter, and in each step of the
// all-gather the pieces that the receiver lacks; about 2 count (size - 1) / size.
Plan halving_all_reduce(int rank, int size, size_t count) {
  const Range input{Space::input, 0, count}, output{Space::output, 0, count};
  if (size == 1) return copy_plan(input, output);
  Plan plan;
  const auto pieces = [&](Space space) {
    return [=](int i) { return piece(space, count, size, i); };
  };
  const Rotated down(plan, rank, size, pieces(Space::input));
  down.copy_in();
  down.reduce(down.run(0, 1));
  const Rotated up(plan, rank, size, pieces(Space::output));
  up.gather();
  up.copy_out();
  return plan;
}

// The first half of the all-reduce: steps 1 and 2 in the drawing, with the sum written directly to
// the output.
//
// Steps: log. Elements sent: all parts except its own, (size - 1) count.
Plan halving_reduce_scatter(const CollectiveShape& at) {
  const auto parts = [&](int i) { return part(Space::input, at.count, at.counts, i); };
  const Range output{Space::output, 0, parts(at.rank).count};
  if (at.size == 1) return copy_plan(parts(0), output);
  Plan plan;
  const Rotated down(plan, at.rank, at.size, parts);
  down.copy_in();
  down.reduce(output);
  return plan;
}

// The second half: steps 3 and 4 in the drawing. All data is received in scratch first: a rank with
// all parts has data from every rank, so it may write to the output.
//
// Steps: log. Elements sent: (size - 1) count.
Plan halving_all_gather(const CollectiveShape& at) {
  const auto parts = [&](int i) { return part(Space::output, at.count, at.counts, i); };
  const Range input{Space::input, 0, parts(at.rank).count};
  if (at.size == 1) return copy_plan(input, parts(0));
  Plan plan;
  const Rotated up(plan, at.rank, at.size, parts);
  plan.moves.push_back({at.rank, input, at.rank, up.run(0, 1)});
  up.gather();
  up.copy_out();
  return plan;
}

}  // namespace pycomm::collectives
