// The inspector of arrays: reads tensors and NumPy arrays that are contiguous, in host memory or on
// a GPU, with a supported dtype. pycomm._core_api.arrays copies or describes all others and reports
// the errors.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/contiguous_array.h"

namespace pycomm::bindings {

// Empty if `x` is not such an array, or `write` and it is read-only. Leaves no Python error set.
std::optional<ContiguousArray> read_array(PyObject* x, bool write = true);
bool are_apart(const ContiguousArray& a, const ContiguousArray& b);
// Whether `rows` has a row like `row` for each rank, of which this rank's may be `row` itself.
bool are_rows(const ContiguousArray& rows, const ContiguousArray& row, int rank, int size);
// The reader of torch's tensors from now on.
void set_tensor_reader(TensorReader reader);

}  // namespace pycomm::bindings
