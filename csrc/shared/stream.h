// A copy whose stores go round the caches, into memory that another processor is about to read.
// Called by shared_run.cpp alone.
#pragma once

#include <cstddef>

namespace pycomm {

// As memcpy. What it writes is behind no store that comes after it until end_stream().
void stream(std::byte* into, const std::byte* from, size_t bytes);
void end_stream();

}  // namespace pycomm
