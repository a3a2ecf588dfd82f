// Bindings of cuda_nccl.cpp, shared by cuda.cpp and the emulator in tests/emulator.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <span>

#include "nccl/nccl.h"

namespace pycomm::bindings {

namespace py = pybind11;

// `load` returns the library of the first place that has it; see nccl/nccl.h.
void bind_nccl(py::module_& module,
               std::shared_ptr<nccl::NcclApi> (*load)(std::span<const nccl::NcclPlace> places));

}  // namespace pycomm::bindings
