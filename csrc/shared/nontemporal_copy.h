// Copy with non-temporal stores, which bypass the caches, into memory that another processor reads
// next.
#pragma once

#include <cstddef>

namespace pycomm::shared {

// Like memcpy. The stores are not ordered before later stores until nontemporal_fence().
void nontemporal_copy(std::byte* into, const std::byte* from, size_t bytes);
void nontemporal_fence();

}  // namespace pycomm::shared
