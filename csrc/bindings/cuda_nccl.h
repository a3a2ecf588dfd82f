// Declares what cuda_nccl.cpp adds to _cuda. Called by cuda.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bindings {

namespace py = pybind11;

void bind_nccl(py::module_& module);

}  // namespace pycomm::bindings
