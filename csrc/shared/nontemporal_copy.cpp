#include "shared/nontemporal_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/copy.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pycomm::shared {

#ifdef __SSE2__
namespace {

constexpr size_t kLine = 64;

}  // namespace

// Only whole cache lines bypass the caches; the head and the tail use plain stores.
void nontemporal_copy(std::byte* into, const std::byte* from, size_t bytes) {
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(into) % kLine);
  std::memcpy(into, from, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto load = [&](size_t at) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from + i + at));
    };
    const __m128i a = load(0), b = load(16), c = load(32), d = load(48);
    const auto store = [&](size_t at, __m128i x) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(into + i + at), x);
    };
    store(0, a);
    store(16, b);
    store(32, c);
    store(48, d);
  }
  std::memcpy(into + i, from + i, bytes - i);
}

void nontemporal_fence() { _mm_sfence(); }
#else
void nontemporal_copy(std::byte* into, const std::byte* from, size_t bytes) {
  std::memcpy(into, from, bytes);
}
void nontemporal_fence() {}
#endif

void OutputCopy::operator()(std::byte* into, const std::byte* from, size_t bytes) const {
  if (past_caches_ && into != from)
    nontemporal_copy(into, from, bytes);
  else
    cpu::copy(into, from, bytes);
}

}  // namespace pycomm::shared
