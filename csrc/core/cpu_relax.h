// A hint to the processor that this thread spins on memory: lets the other hardware thread of the
// core run, and saves power.
#pragma once

namespace pycomm {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most Arm cores; isb takes some 10 ns
#else
  asm volatile("" ::: "memory");
#endif
}

}  // namespace pycomm
