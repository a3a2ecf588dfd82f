// Hints to the processor.
#pragma once

namespace pycomm {

// This thread spins on memory: lets the other hardware thread of the core run, and saves power.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most Arm cores; isb takes some 10 ns
#else
  asm volatile("" ::: "memory");
#endif
}

// This thread will write the cache line of `address`: takes it from other cores meanwhile.
inline void prefetch_for_write(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

}  // namespace pycomm
