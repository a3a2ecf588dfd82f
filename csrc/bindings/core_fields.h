// The fields of a _core.Call from Python's values.
#pragma once

#include <pybind11/pybind11.h>

#include "group/group.h"

namespace pycomm::bindings {

// Call(operation, *, op=, peer=, ...), from its arguments and the names of the last ones.
group::Call call_from(PyObject* const* given, PyObject* keywords);
// Before the first call_from().
void intern_field_names();
// The reduction of a name, NumPy's or torch's too, or of a torch.distributed.ReduceOp.
ReduceOp reduce_op_from(const pybind11::handle& x);

}  // namespace pycomm::bindings
