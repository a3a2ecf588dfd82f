// Bindings of cuda_device.cpp for device groups, shared by cuda.cpp and the emulator in
// tests/emulator.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bindings {

namespace py = pybind11;

void bind_device(py::module_& module);

}  // namespace pycomm::bindings
