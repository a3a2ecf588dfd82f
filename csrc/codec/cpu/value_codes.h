// Encodes and decodes values with the codes of compact.h, in independent blocks of 4096.
#pragma once

#include <cstddef>
#include <span>

#include "codec/format.h"

namespace pycomm::codec {

// Encodes one block of at most kValueBlock values to value_bytes(). A non-finite value makes all
// values with the same level NaN.
void write_values(ValueCode code, std::span<const float> values, std::byte* out);
// Decodes a block. All bytes are valid.
void read_values(ValueCode code, const std::byte* in, std::span<float> values);

// The block codes by their bits per value, 1, 2, 3, 4 or 8, of level_block_bytes(). 1 to 3 are
// those of the ValueCode, 4 and 8 are described in kernels/quantize.h. All bytes are valid.
void write_levels(unsigned bits, std::span<const float> values, std::byte* out);
void read_levels(unsigned bits, const std::byte* in, std::span<float> values);
// False if the block had a non-finite value, so that it decodes to NaN.
bool has_finite_levels(unsigned bits, const std::byte* in);

// Whether the bits after the last value are zero, as required.
bool values_end_in_zeros(ValueCode code, std::span<const std::byte> bytes, size_t count);

}  // namespace pycomm::codec
