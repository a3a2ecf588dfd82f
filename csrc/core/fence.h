// Orders an earlier store before a later load, which release and acquire order do not.
#pragma once

#include <atomic>

namespace pycomm {

inline void store_load_fence() {
#if defined(__SANITIZE_THREAD__)
  static thread_local std::atomic<int> word;  // ThreadSanitizer has no fences
  (void)word.exchange(0);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace pycomm
