// An engine without any buffering, on symbols.
#include "prove.h"

#include <algorithm>
#include <cstdint>

#include "shapes.h"
#include "symbols.h"

namespace pycomm {
namespace {

using namespace symbols;

struct Rank {
  int rank = 0;
  const collectives::Plan* plan = nullptr;
  Shape shape;
  Memory memory;
  size_t base[3] = {};         // where each space begins in memory
  size_t reach[3] = {};        // elements of each space
  size_t sending = 0;          // the move whose send is next
  size_t receiving = 0;        // the move whose receive or copy is next
  uint64_t heard = 0;          // the ranks whose headers have come, through any chain
  uint64_t tells = 0;          // what its messages say of that
  int sent = 0, received = 0;  // the steps after which the last of each was over
};

class Prover {
 public:
  Prover(const std::vector<collectives::Plan>& plans, const Case& what);
  Proof run();

 private:
  bool advance(Rank& at);
  bool send(Rank& from);
  bool copy(Rank& at);
  void land(Rank& at, const std::vector<Run>& arrived, uint64_t told, int over);
  void finish(std::vector<Run>& sums);
  Run sum_of(Expressions::Kind kind, Run a, const Run& b);
  std::vector<Run> combine(Rank& at, const collectives::Move& move,
                           const std::vector<Run>& arrived);
  std::vector<Run> fold(const std::vector<Run>& slots, size_t count);
  std::vector<Run> look(Rank& at, const collectives::Range& range);
  bool readable(const Rank& at) const;
  bool writable(const Rank& at) const;
  bool overlap(const Rank& at, const collectives::Range& a, const collectives::Range& b) const;
  bool may_overlap(const Rank& at, collectives::Range a, collectives::Range b) const;
  bool is_local(const Rank& at, const collectives::Move& move) const {
    return move.from == at.rank;
  }
  int host_of(const Rank& at) const {
    return what_.hosts.empty() ? 0 : what_.hosts[static_cast<size_t>(at.rank)];
  }
  void set_up(Rank& at);
  void check_move(const Rank& at, const collectives::Move& move) const;
  void check_deadlock() const;
  void check_results();
  void check_result(const Rank& at, const std::vector<Run>& result);
  void check_sum(int expression);
  template <typename Work>
  static auto in_move(const Rank& at, size_t index, Work work) {
    const auto where = [&] {
      return "rank " + std::to_string(at.rank) + ", move " + text(index) + ": ";
    };
    return blame(where, work);
  }

  Case what_;
  size_t size_;
  uint64_t all_;
  Expressions expressions_;
  int whole_fold_ = -1;
  std::vector<Rank> ranks_;
  Proof proof_;
};

constexpr int kSum = -1;

size_t index_of(collectives::Space space) { return static_cast<size_t>(space); }

Prover::Prover(const std::vector<collectives::Plan>& plans, const Case& what)
    : what_(what),
      size_(plans.size()),
      all_(plans.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << plans.size()) - 1),
      ranks_(plans.size()) {
  proof_.messages.resize(size_);
  proof_.elements.resize(size_);
  for (size_t r = 0; r < size_; ++r) {
    ranks_[r].rank = static_cast<int>(r);
    ranks_[r].plan = &plans[r];
    set_up(ranks_[r]);
    const int leaf = expressions_.leaf(static_cast<int>(r));
    whole_fold_ = r == 0 ? leaf : expressions_.add(Expressions::Kind::wide, whole_fold_, leaf);
  }
  whole_fold_ = expressions_.finish(whole_fold_);
}

// Lays out the three spaces and puts the rank's own elements where the caller has them.
void Prover::set_up(Rank& at) {
  const Shape& shape = at.shape = shape_of(what_, at.rank, static_cast<int>(size_));
  at.reach[0] = shape.input;
  at.reach[1] = shape.output;
  at.reach[2] = at.plan->scratch;
  at.base[0] = what_.aliased ? shape.own_in_output : 0;
  at.base[1] = what_.aliased ? shape.own_in_input : shape.input;
  at.base[2] = shape.input + shape.output;
  at.heard = at.tells = bit(at.rank);
  const bool casts = what_.operation == Operation::broadcast;
  const size_t own = !shape.gives ? 0 : casts ? shape.output : shape.input;
  const size_t place = casts ? at.base[1] : at.base[0];
  if (own > 0)
    at.memory.replace(place, place,
                      {Run{.begin = place,
                           .count = own,
                           .expression = expressions_.leaf(at.rank),
                           .element = shape.element,
                           .heard = at.heard}});
  for (size_t i = 0; i < at.plan->moves.size(); ++i)
    in_move(at, i, [&] { check_move(at, at.plan->moves[i]); });
}

bool Prover::overlap(const Rank& at, const collectives::Range& a,
                     const collectives::Range& b) const {
  const size_t a_begin = at.base[index_of(a.space)] + a.begin;
  const size_t b_begin = at.base[index_of(b.space)] + b.begin;
  return a_begin < b_begin + b.count && b_begin < a_begin + a.count && a.count > 0 && b.count > 0;
}

// The engine does not know whether input and output are one array, and takes them for one.
bool Prover::may_overlap(const Rank& at, collectives::Range a, collectives::Range b) const {
  if (overlap(at, a, b)) return true;
  if (a.space == collectives::Space::input) a.space = collectives::Space::output;
  if (b.space == collectives::Space::input) b.space = collectives::Space::output;
  return overlap(at, a, b);
}

// Checks of a single move.
void Prover::check_move(const Rank& at, const collectives::Move& move) const {
  const auto fits = [&](const collectives::Range& range) {
    return range.begin + range.count <= at.reach[index_of(range.space)];
  };
  const auto same = [&](const collectives::Range& a, const collectives::Range& b) {
    return a.count == b.count &&
           at.base[index_of(a.space)] + a.begin == at.base[index_of(b.space)] + b.begin;
  };
  const int size = static_cast<int>(size_);
  if (move.to < collectives::kNoRank || move.to >= size || move.from < collectives::kNoRank ||
      move.from >= size)
    violate("its peer is not in the group");
  if (move.to == collectives::kNoRank && move.from == collectives::kNoRank)
    violate("it does nothing");
  if ((move.to == at.rank) != (move.from == at.rank)) violate("it is only half local");
  const bool adds =
      move.combine == collectives::Combine::reduce || move.combine == collectives::Combine::finish;
  if (move.to != collectives::kNoRank && !fits(move.out)) violate("`out` leaves its memory");
  if (move.from == collectives::kNoRank) return;
  if (!fits(move.in)) violate("`in` leaves its memory");
  if (move.in.space == collectives::Space::input && move.in.count > 0)
    violate("it writes to the input");
  if (adds && (!fits(move.with) || move.with.count != move.in.count))
    violate("`with` leaves its memory or is not as long as `in`");
  if (adds && overlap(at, move.in, move.with) && !same(move.in, move.with))
    violate("`in` overlaps a part of `with`");
  const bool stays = is_local(at, move) && move.combine == collectives::Combine::copy;
  if (move.to != collectives::kNoRank && overlap(at, move.in, move.out) &&
      !(stays && same(move.in, move.out)))
    violate("`in` overlaps `out`");
  if (move.combine == collectives::Combine::fold && !is_local(at, move))
    violate("it folds what comes from a peer");
}

// The contents of `range`, counted from its begin.
std::vector<Run> Prover::look(Rank& at, const collectives::Range& range) {
  const size_t begin = at.base[index_of(range.space)] + range.begin;
  std::vector<Run> found;
  size_t done = 0;
  for (Run run : at.memory.between(begin, begin + range.count)) {
    run.begin -= begin;
    if (run.begin != done) break;
    done += run.count;
    found.push_back(run);
  }
  static constexpr const char* kSpaces[] = {"input", "output", "scratch"};
  if (done < range.count)
    violate("element " + text(range.begin + done) + " of " + kSpaces[index_of(range.space)] +
            " is read before it is there");
  return found;
}

// Whether all data of the next send is there.
bool Prover::readable(const Rank& at) const {
  const auto& moves = at.plan->moves;
  for (size_t i = at.receiving; i < at.sending; ++i)
    if (moves[i].from != collectives::kNoRank &&
        may_overlap(at, moves[i].in, moves[at.sending].out))
      return false;
  return true;
}

// Whether everything that the next receive overwrites has been sent.
bool Prover::writable(const Rank& at) const {
  const auto& moves = at.plan->moves;
  for (size_t i = at.sending; i < at.receiving; ++i)
    if (moves[i].to != collectives::kNoRank && moves[i].to != at.rank &&
        may_overlap(at, moves[i].out, moves[at.receiving].in))
      return false;
  return true;
}

bool Prover::advance(Rank& at) {
  const auto& moves = at.plan->moves;
  const auto sends = [&](const collectives::Move& m) {
    return m.to != collectives::kNoRank && m.to != at.rank;
  };
  while (at.sending < moves.size() && !sends(moves[at.sending])) ++at.sending;
  while (at.receiving < moves.size() && moves[at.receiving].from == collectives::kNoRank)
    ++at.receiving;
  return (at.receiving < moves.size() && copy(at)) || (at.sending < moves.size() && send(at));
}

bool Prover::copy(Rank& at) {
  const collectives::Move& move = at.plan->moves[at.receiving];
  if (!is_local(at, move) || !writable(at)) return false;
  in_move(at, at.receiving, [&] { land(at, look(at, move.out), at.heard, at.received); });
  ++at.receiving;
  return true;
}

bool Prover::send(Rank& from) {
  const collectives::Move& move = from.plan->moves[from.sending];
  Rank& to = ranks_[static_cast<size_t>(move.to)];
  const auto& theirs = to.plan->moves;
  while (to.receiving < theirs.size() && theirs[to.receiving].from == collectives::kNoRank)
    ++to.receiving;
  if (to.receiving == theirs.size() || theirs[to.receiving].from != from.rank) return false;
  if (!readable(from) || !writable(to)) return false;
  int start = from.sent;
  const auto message = in_move(from, from.sending, [&] { return look(from, move.out); });
  for (const Run& run : message) {
    start = std::max(start, run.landed);
    from.tells |= run.heard;
  }
  in_move(to, to.receiving, [&] {
    if (const size_t due = theirs[to.receiving].in.count; due != move.out.count)
      violate(text(due) + " elements are due, but rank " + std::to_string(from.rank) + " sends " +
              text(move.out.count));
    land(to, message, from.tells, start + 1);
  });
  from.sent = to.received;
  const size_t begin = from.base[index_of(move.out.space)] + move.out.begin;
  for (Run& run : from.memory.between(begin, begin + move.out.count)) run.read = from.sent;
  if (host_of(from) != host_of(to)) proof_.crossed += move.out.count;
  ++proof_.messages[static_cast<size_t>(from.rank)];
  proof_.elements[static_cast<size_t>(from.rank)] += move.out.count;
  ++from.sending;
  ++to.receiving;
  return true;
}

// The next receive of `at`. `over` is the step after which the message could be here at the
// earliest.
void Prover::land(Rank& at, const std::vector<Run>& arrived, uint64_t told, int over) {
  const collectives::Move& move = at.plan->moves[at.receiving];
  const int length = is_local(at, move) ? 0 : 1;
  const size_t begin = at.base[index_of(move.in.space)] + move.in.begin;
  at.heard |= told;
  for (const Run& run : at.memory.between(begin, begin + move.in.count))
    over = std::max(over, run.read + length);
  at.received = over = std::max(over, at.received + length);
  proof_.steps = std::max(proof_.steps, over);
  if (move.in.space == collectives::Space::output && move.in.count > 0 && at.heard != all_ &&
      !at.shape.one_way)
    violate("output element " + text(move.in.begin) + " is written before rank " +
            text(first_of(all_ & ~at.heard)) + " has been heard of");
  auto fresh = combine(at, move, arrived);
  for (Run& run : fresh) {
    run.begin += begin;
    run.heard = at.heard;
    run.landed = over;
    run.read = 0;
  }
  at.memory.replace(begin, begin + move.in.count, fresh);
}

std::vector<Run> Prover::combine(Rank& at, const collectives::Move& move,
                                 const std::vector<Run>& arrived) {
  if (move.combine == collectives::Combine::fold) {
    if (move.out.count != size_ * move.in.count) violate("it does not fold one slot for each rank");
    return fold(arrived, move.in.count);
  }
  if (is_local(at, move) && move.combine == collectives::Combine::copy && move.out.count == 0 &&
      move.in.count > 0)
    return {Run{.count = move.in.count, .expression = expressions_.token()}};
  if (move.out.count != move.in.count && is_local(at, move))
    violate("`in` is not as long as `out`");
  if (move.combine == collectives::Combine::copy) return arrived;
  std::vector<Run> sums;
  in_pairs(arrived, look(at, move.with), [&](const Run& a, const Run& b) {
    sums.push_back(sum_of(Expressions::Kind::add, a, b));
  });
  if (move.combine == collectives::Combine::finish) finish(sums);
  return sums;
}

Run Prover::sum_of(Expressions::Kind kind, Run a, const Run& b) {
  const auto where = [&] { return "element " + text(a.element) + ": "; };
  blame(where, [&] {
    if (a.element != b.element) violate("it is added to element " + text(b.element));
    a.expression = expressions_.add(kind, a.expression, b.expression);
  });
  return a;
}

void Prover::finish(std::vector<Run>& sums) {
  for (Run& run : sums) run.expression = expressions_.finish(run.expression);
}

std::vector<Run> Prover::fold(const std::vector<Run>& slots, size_t count) {
  std::vector<Run> sum;
  for (size_t slot = 0; slot < size_ && count > 0; ++slot) {
    std::vector<Run> here;
    for (const Run& run : slots) {
      const size_t begin = std::max(run.begin, slot * count);
      const size_t end = std::min(run.begin + run.count, (slot + 1) * count);
      if (begin >= end) continue;
      here.push_back(part_of(run, begin, end - begin));
      here.back().begin -= slot * count;
    }
    if (slot == 0) {
      sum = here;
      continue;
    }
    std::vector<Run> next;
    in_pairs(sum, here, [&](const Run& a, const Run& b) {
      next.push_back(sum_of(Expressions::Kind::wide, a, b));
    });
    sum = next;
  }
  finish(sum);
  return sum;
}

void Prover::check_deadlock() const {
  std::string stuck;
  for (const Rank& at : ranks_) {
    const auto& moves = at.plan->moves;
    const std::string who = "; rank " + std::to_string(at.rank);
    if (at.sending < moves.size())
      stuck += who + " cannot send to rank " + std::to_string(moves[at.sending].to) + " in move " +
               text(at.sending);
    if (at.receiving < moves.size())
      stuck += who + " waits for rank " + std::to_string(moves[at.receiving].from) + " in move " +
               text(at.receiving);
  }
  if (!stuck.empty()) violate("deadlock" + stuck);
}

void Prover::check_sum(int expression) {
  const uint64_t missing = all_ & ~expressions_.ranks(expression);
  if (missing) violate("it lacks rank " + text(first_of(missing)));
  if (size_ == 1) return;
  if (!expressions_.finished(expression)) violate("it is not finished");
  if (expression != whole_fold_) proof_.folded = false;
}

void Prover::check_result(const Rank& at, const std::vector<Run>& result) {
  std::vector<Run> wanted;  // what is wanted as a run, its expression the giver's number
  size_t begin = 0;
  for (const Wanted& part : at.shape.wanted) {
    if (part.count > 0)
      wanted.push_back({.begin = begin,
                        .count = part.count,
                        .expression = part.sum ? kSum : part.giver,
                        .element = part.element});
    begin += part.count;
  }
  in_pairs(result, wanted, [&](const Run& run, const Run& due) {
    const auto where = [&] { return "element " + text(run.begin) + ": "; };
    blame(where, [&] {
      if (run.element != due.element) violate("it is element " + text(run.element));
      if (due.expression == kSum)
        check_sum(run.expression);
      else if (run.expression != expressions_.leaf(due.expression))
        violate("it is not what rank " + std::to_string(due.expression) + " gave");
    });
  });
}

void Prover::check_results() {
  std::vector<Run> first;
  for (Rank& at : ranks_) {
    const auto where = [&] { return "rank " + std::to_string(at.rank) + ", at the end: "; };
    blame(where, [&] {
      if (what_.operation == Operation::barrier && at.heard != all_)
        violate("it has not heard of rank " + text(first_of(all_ & ~at.heard)));
      const auto result = look(at, {collectives::Space::output, 0, at.reach[1]});
      check_result(at, result);
      if (at.rank == 0) first = result;
      if (what_.operation != Operation::all_reduce) return;
      in_pairs(first, result, [&](const Run& a, const Run& b) {
        if (a.expression != b.expression)
          violate("element " + text(b.begin) + ": it is added up otherwise than on rank 0");
      });
    });
  }
}

Proof Prover::run() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Rank& at : ranks_)
      while (advance(at)) moved = true;
  }
  check_deadlock();
  check_results();
  return proof_;
}

}  // namespace

Proof prove(const std::vector<collectives::Plan>& plans, const Case& what) {
  try {
    return Prover(plans, what).run();
  } catch (const Violation& error) {
    Proof failed;
    failed.error = error.what();
    return failed;
  }
}

}  // namespace pycomm
