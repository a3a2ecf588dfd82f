// Sleep and wake-up between two processes without a lost wake-up.
//
// The sleeper arms the flag and then looks once more for what it waits for. The other side stores
// what is waited for and then looks at the flag. A fence, or sequentially consistent operations,
// keep the store before the load on both sides. So at least one side sees the store of the other.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/atomics.h"

namespace pycomm {

// Zeroed memory is a valid initial flag.
template <typename Atomics = StdAtomics>
class SleepFlag {
 public:
  void arm() {
    asleep_.store(1, std::memory_order_relaxed);
    Atomics::store_load_fence();
  }
  void disarm() { asleep_.store(0, std::memory_order_relaxed); }
  // The caller's store before is sequentially consistent, or store_load_fence() follows it. True:
  // the sleeper must be woken. exchange(): by one of several callers.
  bool claim() { return asleep_.load() != 0 && asleep_.exchange(0) != 0; }

 private:
  typename Atomics::template Atomic<uint32_t> asleep_;
};

}  // namespace pycomm
