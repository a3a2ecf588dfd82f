// Values as bytes, by the codes of lean.h: 4096 at a time, each by itself. Called by lean.cpp.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/lean_layout.h"

namespace pycomm::cpu {

// One block of at most kValueBlock values to value_bytes() of it. What is not finite makes NaN of
// all that share its scale or level.
void write_values(ValueCode code, std::span<const float> values, std::byte* out);
// And back. Any bytes have a meaning.
void read_values(ValueCode code, const std::byte* in, std::span<float> values);

// Whether bits behind the last value are zeros, as they must be.
bool values_end_in_zeros(ValueCode code, std::span<const std::byte> bytes, size_t count);

}  // namespace pycomm::cpu
