// Work of a stream that waits for a word that the host sets.
#pragma once

#include <cstdint>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// Later work of the stream starts when *word, in pinned host memory, is at least `value`, modulo
// 2^32; it sees what the host wrote before it stored that value with release order.
void wait_for_host_word(const uint32_t* word, uint32_t value, kernels::Queue queue);

}  // namespace pycomm::cuda
