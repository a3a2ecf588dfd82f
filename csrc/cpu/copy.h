// Copies payload with vector loads and stores. glibc's memcpy uses `rep movsb` for more than some
// kilobytes, which on some processors takes 20 times as long where the destination begins up to 15
// bytes behind the source modulo 4096.
#pragma once

#include <cstddef>

namespace pycomm::cpu {

// The ranges are equal or do not overlap.
void copy(std::byte* into, const std::byte* from, size_t bytes);

}  // namespace pycomm::cpu
