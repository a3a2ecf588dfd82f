// The reductions of one instruction set. kernels.h is the interface for everybody; this one is for
// reducers.cpp, which chooses the set, and for the test, which runs them all.
#pragma once

#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

namespace pycomm::cpu {

// Of a set that runs here; those of avx512 are avx2's, as they wait for memory. All null where the
// pair has no meaning.
const Reducer& reducer_for(Isa isa, Dtype dtype, ReduceOp op);

}  // namespace pycomm::cpu
