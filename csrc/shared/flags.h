// What a rank publishes in its segment for the other ranks of its host.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "core/atomic_words.h"
#include "core/atomics.h"
#include "core/sleep_flag.h"

namespace pycomm::shared {

// A number that its owner raises. Whatever the owner wrote before raise(), a rank that finds the
// flag reached() sees; whatever that rank read or wrote, the next one to find its flag reached()
// may overwrite. Zeroed memory is a valid initial flag.
template <typename Atomics = StdAtomics>
class Flag {
 public:
  void raise(uint64_t value) { value_.store(value, std::memory_order_release); }
  uint64_t value() const { return value_.load(std::memory_order_acquire); }
  bool reached(uint64_t need) const { return value() >= need; }

 private:
  typename Atomics::template Atomic<uint64_t> value_;
};

// The current call of a rank and its header: a seqlock whose version is the number of the call,
// which is never reused. 0: no call.
template <typename Header, typename Atomics = StdAtomics>
class CurrentCall {
 public:
  struct Call {
    uint64_t number;
    Header header;
  };
  // What the rank wrote before is visible to a rank that reads this number.
  void publish(uint64_t number, const Header& header) {
    number_.store(0, std::memory_order_relaxed);
    header_.store(header);
    number_.store(number, std::memory_order_release);
  }
  void withdraw() { number_.store(0, std::memory_order_relaxed); }
  uint64_t number() const { return number_.load(std::memory_order_acquire); }
  // Nothing if there is no call, or another one begins meanwhile.
  std::optional<Call> read() const {
    const Call call{number(), header_.load()};
    if (call.number == 0 || number_.load(std::memory_order_relaxed) != call.number) return {};
    return call;
  }

 private:
  typename Atomics::template Atomic<uint64_t> number_;
  AtomicWords<Header, Atomics> header_;
};

// Wakes the ranks that sleep until a flag changes, after rank `own` raised one: calls wake(i) for
// each other rank that is armed in flag(i), 0 <= i < n. The fence orders the raise before the
// loads. The own flag may be armed: a task advances once more before a sleep.
template <typename Atomics = StdAtomics, typename FlagOf, typename Wake>
void wake_sleepers(int n, int own, FlagOf flag, Wake wake) {
  Atomics::store_load_fence();
  for (int i = 0; i < n; ++i)
    if (i != own && flag(i).claim()) wake(i);
}

}  // namespace pycomm::shared
