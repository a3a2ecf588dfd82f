// Entry point of the CPU reductions: selects the best instruction set of this processor and rejects
// undefined pairs.
#include <string>

#include "core/errors.h"
#include "kernels/cpu/reduce.h"
#include "kernels/kernels.h"

namespace pycomm::kernels {

const Reducer& reducer(Dtype dtype, ReduceOp op) {
  const Reducer& found = reducer_for(cpu::isa_here(), dtype, op);
  if (found.reduce != nullptr) return found;
  throw Unsupported(std::string(name_of(op)) + " of " + std::string(name_of(dtype)) +
                    " is not defined: " +
                    (op == ReduceOp::avg ? "use sum and divide, or a float dtype"
                                         : "view the array as integers of the same width"));
}

}  // namespace pycomm::kernels
