// The prover's memory: expressions over ranks, and runs of places that share one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace pycomm::symbols {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void violate(const std::string& text) { throw Violation(text); }

inline std::string text(size_t number) { return std::to_string(number); }
inline uint64_t bit(int rank) { return uint64_t{1} << rank; }
inline size_t first_of(uint64_t ranks) { return static_cast<size_t>(std::countr_zero(ranks)); }

// Expressions by number; equal expressions have equal numbers.
class Expressions {
 public:
  // `wide` is an addition inside a fold, where nothing is rounded: with other bits than a plain
  // one.
  enum class Kind : uint8_t { leaf, add, wide, finish };

  int leaf(int rank) { return number({Kind::leaf, rank, 0}, {bit(rank), false}); }

  // No rank's data: zeros that only carry the set of ranks heard of.
  int token() { return number({Kind::leaf, -1, 0}, {0, false}); }

  int add(Kind kind, int a, int b) {
    if (finished(a) || finished(b)) violate("a finished sum is added to");
    if (const uint64_t both = ranks(a) & ranks(b))
      violate("rank " + text(first_of(both)) + " is counted twice");
    return number({kind, std::min(a, b), std::max(a, b)}, {ranks(a) | ranks(b), false});
  }

  int finish(int a) { return number({Kind::finish, a, 0}, {ranks(a), true}); }

  uint64_t ranks(int a) const { return facts_[static_cast<size_t>(a)].ranks; }
  bool finished(int a) const { return facts_[static_cast<size_t>(a)].finished; }

 private:
  struct Facts {
    uint64_t ranks;
    bool finished;
  };
  using Key = std::tuple<Kind, int, int>;

  int number(const Key& key, Facts facts) {
    const auto [at, fresh] = numbers_.emplace(key, static_cast<int>(facts_.size()));
    if (fresh) facts_.push_back(facts);
    return at->second;
  }

  std::map<Key, int> numbers_;
  std::vector<Facts> facts_;
};

// Elements `element`, `element` + 1, ... of one expression at the places from `begin` on.
struct Run {
  size_t begin = 0, count = 0;
  int expression = 0;
  size_t element = 0;
  uint64_t heard = 0;  // the ranks that its holder had heard of on receipt
  int landed = 0;      // the step after which it was available
  int read = 0;        // the last step in which it was sent
};

inline Run part_of(const Run& run, size_t begin, size_t count) {
  Run part = run;
  part.begin = begin;
  part.element += begin - run.begin;
  part.count = count;
  return part;
}

// Runs `work`; its violations are prefixed by `where()`.
template <typename Where, typename Work>
auto blame(Where where, Work work) {
  try {
    return work();
  } catch (const Violation& error) {
    violate(where() + error.what());
  }
}

// Calls use(a's part, b's part) for the longest parts of two runs of equal length that both have.
template <typename Use>
void in_pairs(const std::vector<Run>& a, const std::vector<Run>& b, Use use) {
  size_t done = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const size_t end = std::min(a[i].begin + a[i].count, b[j].begin + b[j].count);
    use(part_of(a[i], done, end - done), part_of(b[j], done, end - done));
    done = end;
    if (a[i].begin + a[i].count == end) ++i;
    if (b[j].begin + b[j].count == end) ++j;
  }
}

// The memory of one rank. Places that were never written are in no run.
class Memory {
 public:
  // The runs between two places, cut to fit.
  std::span<Run> between(size_t begin, size_t end) {
    const size_t first = cut(begin), last = cut(end);
    return std::span(runs_).subspan(first, last - first);
  }

  void replace(size_t begin, size_t end, const std::vector<Run>& fresh) {
    const size_t first = cut(begin), last = cut(end);
    const auto at = runs_.erase(runs_.begin() + static_cast<ptrdiff_t>(first),
                                runs_.begin() + static_cast<ptrdiff_t>(last));
    runs_.insert(at, fresh.begin(), fresh.end());
  }

 private:
  // Makes no run cross `place`; gives the first run from there on.
  size_t cut(size_t place) {
    const auto after = std::partition_point(
        runs_.begin(), runs_.end(), [&](const Run& r) { return r.begin + r.count <= place; });
    const auto index = static_cast<size_t>(after - runs_.begin());
    if (after == runs_.end() || after->begin >= place) return index;
    const Run tail = part_of(*after, place, after->begin + after->count - place);
    after->count = place - after->begin;
    runs_.insert(after + 1, tail);
    return index + 1;
  }

  std::vector<Run> runs_;  // ascending, apart from each other
};

}  // namespace pycomm::symbols
