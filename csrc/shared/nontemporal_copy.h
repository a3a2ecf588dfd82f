// A copy with non-temporal stores, which bypass the caches, into memory that another processor is
// about to read. Called by staged_task.cpp alone.
#pragma once

#include <cstddef>

namespace pycomm {

// As memcpy. What it writes is behind no store that comes after it until nontemporal_fence().
void nontemporal_copy(std::byte* into, const std::byte* from, size_t bytes);
void nontemporal_fence();

}  // namespace pycomm
