// The reductions of one instruction set, for reducers.cpp, which selects the set, and for the test,
// which runs all sets. Other code uses kernels.h.
#pragma once

#include "cpu/isa.h"
#include "kernels/kernels.h"

namespace pycomm::kernels {

// For a supported set. All null for an undefined pair.
const Reducer& reducer_for(cpu::Isa isa, Dtype dtype, ReduceOp op);

}  // namespace pycomm::kernels
