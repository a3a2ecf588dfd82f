// The atomic operations of code without locks. Such code takes them as a template parameter:
// tests/native/weak_memory_test.cpp runs it over a model of a weak memory.
#pragma once

#include <atomic>

namespace pycomm {

struct StdAtomics {
  template <typename T>
  using Atomic = std::atomic<T>;

  // Orders an earlier store before a later load, which release and acquire order do not.
  static void store_load_fence() {
#if defined(__SANITIZE_THREAD__)
    static thread_local std::atomic<int> word;  // ThreadSanitizer has no fences
    (void)word.exchange(0);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  // Orders earlier loads and stores before later stores. Without effect for ThreadSanitizer, which
  // sees no other process.
  static void release_fence() {
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(std::memory_order_release);
#endif
  }
};

}  // namespace pycomm
