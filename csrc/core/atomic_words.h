// Values that other threads or processes may read during a write.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "core/atomics.h"

namespace pycomm {

// One writer at a time. A reader may see a mix of two values, unless it reads the same version from
// another atomic before and after. Then release keeps the store of an odd version before the words,
// and acquire keeps the second load of the version after them.
template <typename T, typename Atomics = StdAtomics>
class AtomicWords {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);

 public:
  void store(const T& value) {
    const auto words = std::bit_cast<std::array<uint64_t, kWords>>(value);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
  }
  T load() const {
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    return std::bit_cast<T>(words);
  }

 private:
  std::array<typename Atomics::template Atomic<uint64_t>, kWords> words_;
};

// A value that one thread at a time writes and any thread reads, without a lock (a seqlock).
// `Words`: tests replace it to read during a write and to write during a read.
template <typename T, typename Words = AtomicWords<T>, typename Atomics = StdAtomics>
class Published {
 public:
  void store(const T& value) {
    const uint64_t before = version_.load(std::memory_order_relaxed);
    version_.store(before + 1, std::memory_order_relaxed);  // odd: a write is under way
    words_.store(value);
    version_.store(before + 2, std::memory_order_release);  // after the words
  }
  T load() const {
    for (;;)
      if (const std::optional<T> value = try_load()) return *value;
  }
  // Nothing if a write is under way, or began since this call did.
  std::optional<T> try_load() const {
    const uint64_t before = version_.load(std::memory_order_acquire);  // before the words
    const T value = words_.load();
    if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) return value;
    return std::nullopt;
  }

 private:
  typename Atomics::template Atomic<uint64_t> version_{0};
  Words words_{};
};

}  // namespace pycomm
