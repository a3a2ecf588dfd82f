// Selects the k largest magnitudes of several concatenated tensors, for topk and the DGC step.
//
//   collect  reads each part of the elements once, in order. Elements at or above the lower bound
//            enter the pool of the part. A full pool drops all but its k best and raises the bound
//            above the dropped ones. It never drops a winner, because k better elements remain.
//   cut      finds the k-th magnitude in the pools, by its bits, and for each part the number of
//            elements above and at it, and so the offset of its winners in the result
//   emit     writes the winners of each part, in index order
//
// The first lower bound affects the time but never the result: if fewer than k elements reach it,
// the caller collects again with a lower bound. Above one element in 64, pools would be large, so
// all elements are read instead, as often as necessary (`dense`): once for each digit of the k-th
// magnitude, and once each to count and to emit.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/hits.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {

inline constexpr size_t kSmallestPart = 1 << 19;       // smaller parts do not pay for a thread
inline constexpr size_t kSmallestDensePart = 1 << 17;  // whose elements are read several times
inline constexpr size_t kMostParts = 8;

constexpr size_t groups_of(size_t count) { return (count + kGroup - 1) / kGroup; }

constexpr bool is_dense(size_t count, size_t k) { return k == 0 || k > count / 64; }
constexpr size_t smallest_part(size_t count, size_t k) {
  return is_dense(count, k) ? kSmallestDensePart : kSmallestPart;
}

// How a selection of k from `count` elements is split, and the size of its pools.
struct Shape {
  size_t parts;
  size_t part_count;  // elements of every part except the last, whole groups
  size_t capacity;    // elements of each pool; 0: dense

  constexpr Shape(size_t count, size_t k)
      : parts(std::clamp<size_t>(count / smallest_part(count, k), 1, kMostParts)),
        part_count(groups_of((count + parts - 1) / parts) * kGroup),
        capacity(is_dense(count, k) ? 0 : std::min(part_count, k + k / 4 + 2 * kGroup)) {}

  constexpr size_t bytes(size_t element_bytes) const {
    return parts * ((capacity * (sizeof(uint32_t) + element_bytes) + 31) / 16 * 16);
  }
};

// Allocates the pools from the workspace.
class BumpAllocator {
 public:
  BumpAllocator(void* data, size_t bytes) : at_(static_cast<std::byte*>(data)), left_(bytes) {}
  template <typename T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 7) / 8 * 8;
    check(bytes <= left_, "the workspace is too small");
    auto* const taken = reinterpret_cast<T*>(at_);
    at_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  std::byte* at_;
  size_t left_;
};

inline constexpr int kDigit = 11;  // bits of a key that are counted together
using Histogram = std::array<uint32_t, 1 << kDigit>;

// The shift of the first digit that kth_largest() counts: the upper bits of a key.
template <typename Key>
inline constexpr int kFirstShift = (8 * static_cast<int>(sizeof(Key)) - 2) / kDigit * kDigit;

// Finds the k-th largest key, 1 <= k <= number of keys. `count(prefix, shift)` returns the
// histogram of the 11 bits above `shift` over the keys whose bits above those are `prefix`. Also
// returns how many keys of that value are among the k largest.
template <typename Key, typename Count>
Key kth_largest(size_t k, size_t& ties, Count&& count) {
  Key prefix = 0;
  for (int shift = kFirstShift<Key>; shift >= 0; shift -= kDigit) {
    const Histogram histogram = count(prefix, shift);
    size_t bin = histogram.size() - 1;
    while (histogram[bin] < k) k -= histogram[bin--];
    prefix = static_cast<Key>(prefix << kDigit | bin);
  }
  ties = k;
  return prefix;
}

// Sums of histograms that several threads count.
using SharedHistogram = std::array<std::atomic<uint32_t>, std::tuple_size_v<Histogram>>;
inline void add_counts(std::span<const uint32_t> histogram, SharedHistogram& sums) {
  for (size_t bin = 0; bin < histogram.size(); ++bin)
    if (histogram[bin] != 0) sums[bin].fetch_add(histogram[bin], std::memory_order_relaxed);
}
inline Histogram sum_of(const SharedHistogram& sums) {
  Histogram histogram;
  for (size_t bin = 0; bin < sums.size(); ++bin) histogram[bin] = sums[bin].load();
  return histogram;
}

template <typename Key>
[[gnu::always_inline]] inline void tally(Histogram& histogram, Key key, Key prefix, int shift) {
  // Two shifts, because a shift by the whole width is undefined.
  if (static_cast<Key>(key >> shift) >> kDigit == prefix)
    ++histogram[key >> shift & (histogram.size() - 1)];
}

// Candidates in index order. `Element` is float, double, or the bits of a 16-bit float.
template <typename Element>
class Pool {
 public:
  using Key = decltype(cpu::key_of(Element{}));

  Pool() = default;
  Pool(BumpAllocator& allocator, size_t capacity, size_t keep)
      : places_(allocator.take<uint32_t>(capacity)),
        elements_(allocator.take<Element>(capacity)),
        capacity_(capacity),
        keep_(keep) {}

  void begin(Key bound) {
    bound_ = bound;
    taken_ = 0;
  }
  Key bound() const { return bound_; }
  size_t size() const { return taken_; }
  uint32_t place(size_t i) const { return places_[i]; }
  std::span<const Element> elements() const { return {elements_, taken_}; }

  // Reads up to kGroup elements; the first has position `place` in the selection.
  void look_at(cpu::Isa isa, const Element* group, size_t count, size_t place) {
    if (taken_ + count > capacity_) keep_the_best();
    for (uint64_t bits = hit_bits(isa, group, count, bound_); bits != 0; bits &= bits - 1) {
      const auto i = static_cast<size_t>(std::countr_zero(bits));
      places_[taken_] = static_cast<uint32_t>(place + i);
      elements_[taken_++] = group[i];
    }
  }

  // Drops all keys below `kth`, and those equal to it after the first `ties`. Without a branch,
  // which would be unpredictable.
  void keep(Key kth, size_t ties) {
    size_t kept = 0;
    for (size_t i = 0; i < taken_; ++i) {
      const Key key = cpu::key_of(elements_[i]);
      const bool on = key == kth, stays = (key > kth) | (on & (ties > 0));
      ties -= on & (ties > 0);
      places_[kept] = places_[i];
      elements_[kept] = elements_[i];
      kept += stays;
    }
    taken_ = kept;
  }

 private:
  // If the pool has more than keep_ elements, it drops the others.
  [[gnu::noinline]] void keep_the_best() {
    size_t ties = 0;
    const Key kth = kth_largest<Key>(keep_, ties, [this](Key prefix, int shift) {
      Histogram histogram{};
      for (const Element element : elements())
        tally(histogram, cpu::key_of(element), prefix, shift);
      return histogram;
    });
    keep(kth, ties);
    bound_ = std::max(bound_, static_cast<Key>(kth + 1));  // a later tie would lose
  }

  uint32_t* places_ = nullptr;
  Element* elements_ = nullptr;
  size_t capacity_ = 0, keep_ = 0, taken_ = 0;
  Key bound_ = 0;
};

// A run of elements of one tensor.
template <typename Element>
struct Slice {
  size_t piece;             // which tensor
  const Element* elements;  // its first one
  size_t begin;             // of the run, in the tensor
  size_t count;
  size_t place;  // of the tensor's first element, in the selection
};

// The elements of one thread.
template <typename Element>
struct Part {
  size_t choice;
  size_t first_slice;
  size_t slices = 0;
  Pool<Element> pool{};
  size_t above = 0, on = 0;  // at the cut; later: in earlier parts
};

template <typename Element>
struct Choice {
  using Key = decltype(cpu::key_of(Element{}));

  size_t k;
  bool dense;
  size_t first_part;
  size_t parts = 0;
  Key kth = 0;      // of the k-th magnitude
  size_t ties = 0;  // how many elements equal to it win
};

// The largest key of each group, so that groups without candidates are skipped.
template <typename Element>
struct LargestKeys {
  using Key = decltype(cpu::key_of(Element{}));
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const Element* elements, size_t count, Key* largest) {
    size_t begin = 0;
    for (; begin + kGroup <= count; begin += kGroup) {
      Key most = 0;
      for (size_t i = begin; i < begin + kGroup; ++i)
        most = std::max(most, cpu::key_of(elements[i]));
      *largest++ = most;
    }
    if (begin < count) *largest = std::numeric_limits<Key>::max();  // read each
  }
};

template <typename Element>
class Selection {
 public:
  using Key = decltype(cpu::key_of(Element{}));

  std::vector<Choice<Element>> choices;
  std::vector<Part<Element>> parts;
  std::vector<Slice<Element>> slices;

  // Starts a selection of k from `count` elements; add() adds its tensors in order.
  void open(size_t count, size_t k, BumpAllocator& allocator) {
    const Shape shape(count, k);
    choices.push_back({.k = k, .dense = shape.capacity == 0, .first_part = parts.size()});
    allocator_ = &allocator;
    capacity_ = shape.capacity;
    part_count_ = shape.part_count;
    left_ = 0;
    place_ = 0;
  }

  void add(size_t piece, const Element* elements, size_t count) {
    for (size_t begin = 0; begin < count;) {
      if (left_ == 0) next_part();
      const size_t n = std::min(left_, count - begin);
      slices.push_back({piece, elements, begin, n, place_});
      ++parts.back().slices;
      begin += n;
      left_ -= n;
    }
    place_ += count;
  }

  std::span<const Slice<Element>> slices_of(const Part<Element>& part) const {
    return {slices.data() + part.first_slice, part.slices};
  }
  std::span<Part<Element>> parts_of(const Choice<Element>& choice) {
    return {parts.data() + choice.first_part, choice.parts};
  }
  std::span<const Part<Element>> parts_of(const Choice<Element>& choice) const {
    return {parts.data() + choice.first_part, choice.parts};
  }

  // Collects candidates of a tile that begins at `begin` of a slice; the largest keys of its groups
  // are known.
  static void collect(cpu::Isa isa, Pool<Element>& pool, const Slice<Element>& slice, size_t begin,
                      size_t count, const Key* largest) {
    const size_t groups = groups_of(count);
    const Key bound = pool.bound();
    unsigned hit = 0;  // a bit for each group; one branch for all, as hits are rare
    for (size_t group = 0; group < groups; ++group)
      hit |= static_cast<unsigned>(largest[group] >= bound) << group;
    look_at(isa, pool, slice, begin, count, hit);
  }

  // Reads all elements of a selection, with this lower bound.
  void collect(cpu::Isa isa, const Choice<Element>& choice, Key bound) {
    const auto own = parts_of(choice);
    parallel(own.size(), [&](size_t p) {
      own[p].pool.begin(bound);
      for (const auto& slice : slices_of(own[p]))
        for (size_t i = 0; i < slice.count; i += kTile)
          collect(isa, own[p].pool, slice, slice.begin + i, std::min(kTile, slice.count - i));
    });
  }

  size_t candidates(const Choice<Element>& choice) const {
    size_t count = 0;
    for (const auto& part : parts_of(choice)) count += part.pool.size();
    return count;
  }

  // The key of the `rank`-th largest candidate, which must exist.
  Key candidate(const Choice<Element>& choice, size_t rank, size_t& ties) const {
    return kth_largest<Key>(rank, ties, [&](Key prefix, int shift) {
      Histogram histogram{};
      for (const auto& part : parts_of(choice))
        for (const Element element : part.pool.elements())
          tally(histogram, cpu::key_of(element), prefix, shift);
      return histogram;
    });
  }

  // After collect(): finds the cut of every selection, and the offset of each part's winners. Runs
  // `beside(i)` for each i below `others` concurrently; it may read candidates.
  template <typename F>
  void cut(size_t others, F&& beside) {
    const size_t own = choices.size();
    parallel(own + others, [&](size_t i) {
      if (i >= own)
        beside(i - own);
      else if (!choices[i].dense)
        choices[i].kth = candidate(choices[i], choices[i].k, choices[i].ties);
    });
    for (auto& choice : choices)
      if (choice.dense && choice.k > 0) cut_all(choice);
    each_part([this](Part<Element>& part) { count_winners(part); });
    for (auto& choice : choices) {
      size_t above = 0, on = 0;
      for (auto& part : parts_of(choice)) {
        above += std::exchange(part.above, above);
        on += std::exchange(part.on, on);
      }
    }
  }

  // Calls winner(at, element, slice, i): result position `at` is element i of the slice's tensor.
  // Once for each part, because it consumes the pool.
  template <typename Winner>
  void emit(Part<Element>& part, Winner&& winner) {
    const Choice<Element>& choice = choices[part.choice];
    const size_t ties = choice.ties - std::min(part.on, choice.ties);  // winners in this part
    size_t at = part.above + (choice.ties - ties), on = 0;
    if (!choice.dense) part.pool.keep(choice.kth, ties);
    const Slice<Element>* slice = slices.data() + part.first_slice;
    each(part, [&](size_t place, Element element) {
      if (choice.dense && cpu::key_of(element) == choice.kth && on++ >= ties) return;
      while (place >= slice->place + slice->begin + slice->count) ++slice;
      winner(at++, element, *slice, place - slice->place);
    });
  }

  // Calls f(part) for each part, on several threads if the work exceeds the cost of a wake-up.
  template <typename F>
  void each_part(F&& f) {
    size_t elements = 0;
    for (const auto& part : parts)
      elements += choices[part.choice].dense ? part_count_ : part.pool.size();
    if (elements < 2 * kSmallestDensePart)
      for (auto& part : parts) f(part);
    else
      parallel(parts.size(), [&](size_t p) { f(parts[p]); });
  }

 private:
  static void look_at(cpu::Isa isa, Pool<Element>& pool, const Slice<Element>& slice, size_t begin,
                      size_t count, unsigned groups) {
    for (; groups != 0; groups &= groups - 1) {
      const size_t at = begin + static_cast<size_t>(std::countr_zero(groups)) * kGroup;
      pool.look_at(isa, slice.elements + at, std::min(kGroup, begin + count - at),
                   slice.place + at);
    }
  }

  // For a tile with unknown keys.
  static void collect(cpu::Isa isa, Pool<Element>& pool, const Slice<Element>& slice, size_t begin,
                      size_t count) {
    const Element* const elements = slice.elements + begin;
#ifdef __x86_64__
    if constexpr (std::is_same_v<Element, float>)
      if (isa != cpu::Isa::baseline && count == kTile)
        return look_at(isa, pool, slice, begin, count, hit_groups_of_tile(elements, pool.bound()));
#endif
    std::array<Key, kTile / kGroup> largest;
    cpu::run_on<LargestKeys<Element>>(isa, elements, count, largest.data());
    collect(isa, pool, slice, begin, count, largest.data());
  }

  void next_part() {
    parts.push_back({.choice = choices.size() - 1, .first_slice = slices.size()});
    if (capacity_ > 0) parts.back().pool = Pool<Element>(*allocator_, capacity_, choices.back().k);
    ++choices.back().parts;
    left_ = part_count_;
  }

  void cut_all(Choice<Element>& choice) {
    const auto own = parts_of(choice);
    choice.kth = kth_largest<Key>(choice.k, choice.ties, [&](Key prefix, int shift) {
      if (own.size() == 1) return counted(own[0], prefix, shift);  // small: the sum would dominate
      SharedHistogram sums{};
      parallel(own.size(), [&](size_t p) { add_counts(counted(own[p], prefix, shift), sums); });
      return sum_of(sums);
    });
  }

  // The histogram of one digit over the keys of a part that have this prefix.
  Histogram counted(const Part<Element>& part, Key prefix, int shift) const {
    Histogram histogram{};
    if (shift == kFirstShift<Key>) {
      for (const auto& slice : slices_of(part))
        for (size_t i = slice.begin; i < slice.begin + slice.count; ++i)
          tally(histogram, cpu::key_of(slice.elements[i]), prefix, shift);
      return histogram;
    }
    const Key low = static_cast<Key>(prefix << (shift + kDigit));
    const auto end = static_cast<Key>(low + (Key{1} << (shift + kDigit)));
    each_hit(part, low, end, [&](size_t, Element element) {
      tally(histogram, cpu::key_of(element), prefix, shift);
    });
    return histogram;
  }

  void count_winners(Part<Element>& part) {
    const Key kth = choices[part.choice].kth;
    size_t above = 0, on = 0;
    each(part, [&](size_t, Element element) {
      above += cpu::key_of(element) > kth;
      on += cpu::key_of(element) == kth;
    });
    part.above = above;
    part.on = on;
  }

  // Calls f(position in the selection, element) for all possible winners, in order.
  template <typename F>
  void each(const Part<Element>& part, F&& f) const {
    const Choice<Element>& choice = choices[part.choice];
    if (choice.k == 0) return;
    if (choice.dense) {
      each_hit(part, choice.kth, kEveryKey, f);
    } else {
      const auto elements = part.pool.elements();
      for (size_t i = 0; i < elements.size(); ++i) f(part.pool.place(i), elements[i]);
    }
  }

  // The same for the elements of a part with a key in low..end-1.
  template <typename F>
  void each_hit(const Part<Element>& part, Key low, Key end, F&& f) const {
    const cpu::Isa isa = cpu::isa_here();
    for (const auto& slice : slices_of(part))
      for (size_t begin = slice.begin, left = slice.count; left > 0;) {
        const Element* const group = slice.elements + begin;
        const size_t n = std::min(left, kGroup);
        uint64_t bits = hit_bits(isa, group, n, low);
        if (end != kEveryKey && bits != 0) bits &= ~hit_bits(isa, group, n, end);
        for (; bits != 0; bits &= bits - 1) {
          const auto i = static_cast<size_t>(std::countr_zero(bits));
          f(slice.place + begin + i, group[i]);
        }
        begin += n;
        left -= n;
      }
  }

  // An `end` above all keys.
  static constexpr Key kEveryKey = std::numeric_limits<Key>::max() / 2 + 1;

  BumpAllocator* allocator_ = nullptr;
  size_t capacity_ = 0, part_count_ = 0;  // of the current selection
  size_t left_ = 0;                       // of its last part
  size_t place_ = 0;                      // where its next tensor begins
};

}  // namespace pycomm::kernels
