// Declares what cuda_nccl.cpp adds to a module that has CUDA. Called by cuda.cpp, and by the
// emulator of tests/emulator in its module.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <span>

#include "nccl/nccl.h"

namespace pycomm::bindings {

namespace py = pybind11;

// `load` gives the library of the first place that has one; see nccl/nccl.h.
void bind_nccl(py::module_& module,
               std::shared_ptr<NcclApi> (*load)(std::span<const NcclPlace> places));

}  // namespace pycomm::bindings
