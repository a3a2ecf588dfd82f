// The k largest magnitudes of some tensors, laid end to end: what topk and the DGC step share.
//
//   collect   somebody reads every element once and keeps those at or above a floor, the
//             candidates, in a pool; a tile of 4096 elements takes a span of the pool
//   cut       the k-th magnitude of the candidates, by their bits; where there are fewer than k of
//             them, or more than the pool holds, that of all elements instead
//   count     for each slice (16 tiles) how many lie above the cut and how many on it, and so
//             where in the result its winners begin and how many of its ties win
//   emit      slices give their winners, in index order
//
// The floor decides how long this takes and never what comes out. Called by topk.cpp and step.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "kernels/cpu/floats.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/threads.h"

namespace pycomm::cpu {

inline constexpr size_t kTile = 4096;
inline constexpr size_t kSlice = 16 * kTile;

// Candidates of one tile, in the pool.
struct Span {
  uint32_t first;
  uint32_t count;
};

// Elements that may stand in the pool. Above one in 16 the pool would not be small any more, and
// all elements are looked at instead.
constexpr size_t pool_capacity(size_t count, size_t k) {
  return k == 0 || k > count / 16 ? 0 : std::min(count, 4 * k + 1024);
}

constexpr size_t tiles_of(size_t count) { return (count + kTile - 1) / kTile; }

// Bytes for the pool of one choice from tensors with so many tiles in all.
constexpr size_t pool_bytes(size_t capacity, size_t tiles, size_t element_bytes) {
  return capacity == 0 ? 0 : tiles * sizeof(Span) + capacity * (sizeof(uint32_t) + element_bytes);
}

// Memory for pools, handed out piece by piece.
class Room {
 public:
  Room(void* data, size_t bytes) : at_(static_cast<std::byte*>(data)), left_(bytes) {}
  template <typename T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 15) / 16 * 16;
    check(bytes <= left_, "the workspace is smaller than it was said to be");
    auto* const taken = reinterpret_cast<T*>(at_);
    at_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  std::byte* at_;
  size_t left_;
};

// A choice of k elements. `Element` is float, double, or the bits of a 16-bit float.
template <typename Element>
struct Choice {
  using Key = decltype(key_of(Element{}));

  size_t k = 0;
  size_t first_slice = 0, slices = 0;
  Key floor = 0;  // 0: no pool is used
  size_t capacity = 0;
  uint32_t* places = nullptr;  // [capacity]: in the tensor
  Element* elements = nullptr;
  std::atomic<size_t> taken{0};

  Key kth = 0;         // of the k-th magnitude
  size_t ties = 0;     // how many of its magnitude win
  bool dense = false;  // chosen from all elements

  Choice() = default;
  Choice(Choice&& other) noexcept
      : k(other.k),
        first_slice(other.first_slice),
        slices(other.slices),
        floor(other.floor),
        capacity(other.capacity),
        places(other.places),
        elements(other.elements) {}  // before it is in use
};

// Up to kSlice elements of one tensor.
template <typename Element>
struct Slice {
  size_t choice;
  size_t piece;
  const Element* elements;  // of the slice
  size_t begin;             // in the tensor
  size_t count;
  size_t place;              // of the tensor's first element in the choice
  Span* spans = nullptr;     // one for each tile
  size_t above = 0, on = 0;  // the cut; later: how many of these there are in slices before
};

inline constexpr size_t kBins = 2048;
using Histogram = std::array<uint32_t, kBins>;

// The k-th largest key, 1 <= k <= number of keys. `count(prefix, shift, digits)` gives the
// histogram of (key >> shift) & 2047 over keys with key >> (shift + 11) == prefix. Also says how
// many keys of that value are among the k largest.
template <typename Key, typename Count>
Key kth_largest(size_t k, size_t& ties, Count&& count) {
  constexpr int kDigit = 11, kWidth = 8 * sizeof(Key) - 1;
  Key prefix = 0;
  for (int shift = (kWidth - 1) / kDigit * kDigit; shift >= 0; shift -= kDigit) {
    const Histogram histogram = count(prefix, shift);
    size_t bin = kBins - 1;
    while (histogram[bin] < k) k -= histogram[bin--];
    prefix = static_cast<Key>(prefix << kDigit | bin);
  }
  ties = k;
  return prefix;
}

template <typename Key>
[[gnu::always_inline]] inline void tally(Histogram& histogram, Key key, Key prefix, int shift) {
  // Two shifts, as one by the whole width has no meaning.
  if (static_cast<Key>(key >> shift) >> 11 == prefix) ++histogram[key >> shift & (kBins - 1)];
}

// Keeps the elements of one tile whose key is at least the floor. Returns how many there are.
template <typename Element>
struct CollectTile {
  template <Isa>
  [[gnu::always_inline]] static size_t run(const Element* elements, size_t count,
                                           typename Choice<Element>::Key floor, uint32_t* places,
                                           Element* kept) {
    constexpr size_t kGroup = 64;
    size_t found = 0;
    for (size_t begin = 0; begin < count; begin += kGroup) {
      const size_t n = std::min(kGroup, count - begin);
      if (n == kGroup && !any(elements + begin, floor)) continue;
      for (size_t i = begin; i < begin + n; ++i) {
        places[found] = static_cast<uint32_t>(i);
        kept[found] = elements[i];
        found += key_of(elements[i]) >= floor;
      }
    }
    return found;
  }

 private:
  [[gnu::always_inline]] static bool any(const Element* elements,
                                         typename Choice<Element>::Key floor) {
    using Key = typename Choice<Element>::Key;
    Key largest = 0;
    for (size_t i = 0; i < 64; ++i) largest = std::max(largest, key_of(elements[i]));
    return largest >= floor;
  }
};

template <typename Element>
class Selection {
 public:
  using Key = typename Choice<Element>::Key;

  std::vector<Choice<Element>> choices;
  std::vector<Slice<Element>> slices;

  // Adds a tensor to the last choice.
  void add(size_t piece, const Element* elements, size_t count, size_t place) {
    for (size_t begin = 0; begin < count; begin += kSlice)
      slices.push_back({.choice = choices.size() - 1,
                        .piece = piece,
                        .elements = elements + begin,
                        .begin = begin,
                        .count = std::min(kSlice, count - begin),
                        .place = place});
    choices.back().slices = slices.size() - choices.back().first_slice;
  }

  // Gives the last choice its pool. Every tensor of it was added.
  void take_pool(Room& room, size_t capacity, size_t tiles) {
    Choice<Element>& choice = choices.back();
    choice.capacity = capacity;
    if (capacity == 0) return;
    Span* spans = room.take<Span>(tiles);
    choice.places = room.take<uint32_t>(capacity);
    choice.elements = room.take<Element>(capacity);
    for (size_t s = choice.first_slice; s < choice.first_slice + choice.slices; ++s) {
      slices[s].spans = spans;
      spans += tiles_of(slices[s].count);
    }
  }

  // The candidates of one tile of a slice, just written or just read.
  void collect(Isa isa, Slice<Element>& slice, size_t tile) {
    Choice<Element>& choice = choices[slice.choice];
    if (choice.floor == 0) return;
    const size_t begin = tile * kTile, count = std::min(kTile, slice.count - begin);
    std::array<uint32_t, kTile + 1> places;
    std::array<Element, kTile + 1> kept;
    const size_t found = run_on<CollectTile<Element>>(isa, slice.elements + begin, count,
                                                      choice.floor, places.data(), kept.data());
    size_t first = 0;
    if (found > 0) first = choice.taken.fetch_add(found, std::memory_order_relaxed);
    const size_t fits = first + found <= choice.capacity ? found : 0;
    slice.spans[tile] = {static_cast<uint32_t>(fits > 0 ? first : 0), static_cast<uint32_t>(fits)};
    for (size_t i = 0; i < fits; ++i) {
      choice.places[first + i] = static_cast<uint32_t>(slice.begin + begin + places[i]);
      choice.elements[first + i] = kept[i];
    }
  }

  // After collect() of all tiles: the cut of every choice, and where each slice's winners go.
  void cut() {
    parallel(choices.size(), [this](size_t c) { cut_candidates(choices[c]); });
    for (auto& choice : choices)
      if (choice.dense) cut_all(choice);
    parallel(slices.size(), [this](size_t s) { count_winners(slices[s]); });
    for (auto& choice : choices) {
      size_t above = 0, on = 0;
      for (size_t s = choice.first_slice; s < choice.first_slice + choice.slices; ++s) {
        above += std::exchange(slices[s].above, above);
        on += std::exchange(slices[s].on, on);
      }
    }
  }

  // winner(at, place in the tensor) for each winner of a slice, `at` counting through the choice.
  template <typename Winner>
  void emit(const Slice<Element>& slice, Winner&& winner) const {
    const Choice<Element>& choice = choices[slice.choice];
    size_t above = slice.above, on = slice.on;
    each(slice, [&](size_t place, Element element) {
      const Key key = key_of(element);
      if (key < choice.kth) return;
      const bool wins = key > choice.kth || on < choice.ties;
      if (wins) winner(above + std::min(on, choice.ties), place);
      above += key > choice.kth;
      on += key == choice.kth;
    });
  }

  // The `rank`-th largest candidate's key; the pool has at least that many.
  Key candidate(const Choice<Element>& choice, size_t rank, size_t& ties) const {
    const std::span<const Element> pool(choice.elements, choice.taken.load());
    return kth_largest<Key>(rank, ties, [pool](Key prefix, int shift) {
      Histogram histogram{};
      for (const Element element : pool) tally(histogram, key_of(element), prefix, shift);
      return histogram;
    });
  }

 private:
  void cut_candidates(Choice<Element>& choice) {
    if (choice.k == 0) return;
    const size_t taken = choice.taken.load();
    choice.dense = choice.floor == 0 || taken < choice.k || taken > choice.capacity;
    if (!choice.dense) choice.kth = candidate(choice, choice.k, choice.ties);
  }

  void cut_all(Choice<Element>& choice) {
    const std::span<const Slice<Element>> mine(slices.data() + choice.first_slice, choice.slices);
    choice.kth = kth_largest<Key>(choice.k, choice.ties, [mine](Key prefix, int shift) {
      std::array<std::atomic<uint32_t>, kBins> sums{};
      parallel(mine.size(), [&](size_t s) {
        Histogram histogram{};
        for (size_t i = 0; i < mine[s].count; ++i)
          tally(histogram, key_of(mine[s].elements[i]), prefix, shift);
        for (size_t bin = 0; bin < kBins; ++bin)
          if (histogram[bin] != 0) sums[bin].fetch_add(histogram[bin], std::memory_order_relaxed);
      });
      Histogram histogram{};
      for (size_t bin = 0; bin < kBins; ++bin) histogram[bin] = sums[bin].load();
      return histogram;
    });
  }

  void count_winners(Slice<Element>& slice) {
    const Choice<Element>& choice = choices[slice.choice];
    if (choice.k == 0) return;
    const Key kth = choice.kth;
    size_t above = 0, on = 0;
    each(slice, [&](size_t, Element element) {
      above += key_of(element) > kth;
      on += key_of(element) == kth;
    });
    slice.above = above;
    slice.on = on;
  }

  // f(place in the tensor, element) for whatever may win, in order.
  template <typename F>
  void each(const Slice<Element>& slice, F&& f) const {
    const Choice<Element>& choice = choices[slice.choice];
    if (choice.k == 0) return;
    if (choice.dense) {
      for (size_t i = 0; i < slice.count; ++i) f(slice.begin + i, slice.elements[i]);
      return;
    }
    for (size_t tile = 0; tile < tiles_of(slice.count); ++tile) {
      const Span span = slice.spans[tile];
      for (size_t i = span.first; i < span.first + span.count; ++i)
        f(choice.places[i], choice.elements[i]);
    }
  }
};

}  // namespace pycomm::cpu
