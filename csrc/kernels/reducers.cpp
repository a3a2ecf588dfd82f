// The entry to the CPU reductions: the best instruction set of this processor, and the refusal of
// pairs without a meaning. Called by engine/ and by the bindings, through kernels.h.
#include <string>

#include "core/errors.h"
#include "kernels/cpu/reduce.h"
#include "kernels/kernels.h"

namespace pycomm {

const Reducer& reducer(Dtype dtype, ReduceOp op) {
  const Reducer& found = cpu::reducer_for(cpu::isa_here(), dtype, op);
  if (found.reduce != nullptr) return found;
  throw Unsupported(std::string(name_of(op)) + " of " + std::string(name_of(dtype)) +
                    " is not defined: " +
                    (op == ReduceOp::avg ? "use sum and divide, or a float dtype"
                                         : "view the array as integers of the same width"));
}

}  // namespace pycomm
