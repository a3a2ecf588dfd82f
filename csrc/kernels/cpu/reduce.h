// The reductions of one instruction set. kernels.h is the interface for everybody; this one is for
// reducers.cpp, which chooses the set, and for the test, which runs them all.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace pycomm::cpu {

enum class Isa : uint8_t { baseline, avx2 };  // avx2 means F16C as well

bool runs_here(Isa isa);

// All null where the pair has no meaning.
const Reducer& reducer_for(Isa isa, Dtype dtype, ReduceOp op);

}  // namespace pycomm::cpu
