// The launches that write the header and the indices of a packet, compact or of groups, and those
// that read packets. Host code only.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "codec/format.h"
#include "cuda/compact_tables.cuh"

namespace pycomm::cuda {

// Places the tables for k indices in the workspace, and returns their size.
size_t lay_out(Writing& w, size_t k, void* workspace);

// Describes a packet of k indices of `count`; its header has `magic`.
void describe(Writing& w, size_t count, codec::ValueCode value_code,
              const std::array<char, 3>& magic);

// They also set `choice` and `bytes`, which the launches for the values read.
void write_indices(std::span<const Writing> rows, cudaStream_t stream);

// Places the tables to read k indices of a packet of `size` bytes in the workspace, and returns
// their size.
size_t lay_out(Reading& r, size_t k, size_t size, void* workspace);

// Describes a packet of indices of `count`. `values`: the number of values of a packet of groups.
// The caller sets the results: indices, values and refused.
void describe(Reading& r, std::span<const std::byte> packet, size_t count,
              std::optional<size_t> values);

void read_packets(std::span<const Reading> rows, cudaStream_t stream);

}  // namespace pycomm::cuda
