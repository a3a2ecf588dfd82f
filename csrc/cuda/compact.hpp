// The launches that write the header and the indices of a packet, compact or of groups. Host code
// only.
#pragma once

#include "codec/format.h"
#include "cuda/compact_tables.cuh"

namespace pycomm::cuda {

// Places the tables for k indices in the workspace, and returns their size.
size_t lay_out(Writing& w, size_t k, void* workspace);

// Describes a packet of k indices of `count`; its header has `magic`.
void describe(Writing& w, size_t count, codec::ValueCode value_code,
              const std::array<char, 3>& magic);

// They also set `choice` and `bytes`, which the launches for the values read.
void write_indices(const Writing& w, cudaStream_t stream);

}  // namespace pycomm::cuda
