#include "cpu/copy.h"

#include <cstdint>
#include <cstring>

#include "cpu/isa.h"

namespace pycomm::cpu {

#ifdef __x86_64__
namespace {

constexpr size_t kLine = 64;
// Below this size glibc's memcpy is a vector loop, too.
constexpr size_t kLeastBytes = 2048;

constexpr size_t vector_bytes(Isa isa) {
  return isa == Isa::avx512 ? 64 : isa == Isa::avx2 ? 32 : 16;
}

struct Copy {
  template <Isa isa>
  [[gnu::always_inline]] static void run(std::byte* __restrict into,
                                         const std::byte* __restrict from, size_t bytes) {
    constexpr size_t kVector = vector_bytes(isa);
    using Vector [[gnu::vector_size(kVector), gnu::aligned(1), gnu::may_alias]] = uint8_t;
    size_t i = -reinterpret_cast<uintptr_t>(into) % kLine;  // no store crosses a cache line
    std::memcpy(into, from, i);
    for (; i + 4 * kVector <= bytes; i += 4 * kVector) {
      const Vector* const source = reinterpret_cast<const Vector*>(from + i);
      Vector* const target = reinterpret_cast<Vector*>(into + i);
      target[0] = source[0];
      target[1] = source[1];
      target[2] = source[2];
      target[3] = source[3];
    }
    std::memcpy(into + i, from + i, bytes - i);
  }
};

}  // namespace

void copy(std::byte* into, const std::byte* from, size_t bytes) {
  if (into == from || bytes == 0) return;
  if (bytes < kLeastBytes)
    std::memcpy(into, from, bytes);
  else
    run_on<Copy>(isa_here(), into, from, bytes);
}
#else
void copy(std::byte* into, const std::byte* from, size_t bytes) {
  if (into != from && bytes > 0) std::memcpy(into, from, bytes);
}
#endif

}  // namespace pycomm::cpu
