#include "kernels/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include "cpu/floats.h"
#include "cpu/isa.h"
#include "kernels/cpu/threads.h"

namespace pycomm::kernels {
namespace {

using cpu::Isa;

constexpr size_t kRange = 1 << 17;  // elements per task of a thread

struct StepLoop {
  template <cpu::Isa>
  [[gnu::always_inline]] static void run(const float* grad, float* u, float* v, size_t count) {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
      u[i] += grad[i];
      v[i] += u[i];
    }
  }
};

struct ReadLoop {
  template <cpu::Isa>
  [[gnu::always_inline]] static uint32_t run(const float* x, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, cpu::key_of(x[i]));
    return most;
  }
};

void copy_nontemporal(const float* from, float* to, size_t count) {
#ifdef __x86_64__
  for (; count > 0 && reinterpret_cast<uintptr_t>(to) % 16 != 0; --count) *to++ = *from++;
  for (; count >= 16; count -= 16, from += 16, to += 16)
    for (size_t i = 0; i < 16; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  _mm_sfence();
#endif
  if (count > 0) std::memcpy(to, from, count * sizeof(float));
}

// Calls f(begin, count) for ranges of an array, on several threads.
template <typename F>
void by_ranges(size_t count, F&& f) {
  parallel((count + kRange - 1) / kRange,
           [&](size_t range) { f(range * kRange, std::min(kRange, count - range * kRange)); });
}

}  // namespace

void stream_step(const float* grad, float* u, float* v, size_t count) {
  by_ranges(count, [=](size_t begin, size_t n) {
    cpu::run_on<StepLoop>(cpu::isa_here(), grad + begin, u + begin, v + begin, n);
  });
}

void stream_copy(const float* from, float* to, size_t count, bool nontemporal) {
  by_ranges(count, [=](size_t begin, size_t n) {
    if (nontemporal)
      copy_nontemporal(from + begin, to + begin, n);
    else
      for (size_t i = begin; i < begin + n; i += 4096)  // small enough for plain stores in memcpy
        std::memcpy(to + i, from + i, std::min<size_t>(4096, begin + n - i) * sizeof(float));
  });
}

unsigned stream_read(const float* x, size_t count) {
  std::atomic<uint32_t> bits{0};
  by_ranges(count, [&](size_t begin, size_t n) {
    bits.fetch_or(cpu::run_on<ReadLoop>(cpu::isa_here(), x + begin, n), std::memory_order_relaxed);
  });
  return bits;
}

}  // namespace pycomm::kernels
