// Bindings of cuda_device.cpp and cuda_bandwidth.cpp for device groups and benchmarks, shared by
// cuda.cpp and the emulator in tests/emulator.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bindings {

namespace py = pybind11;

void bind_device(py::module_& module);
void bind_bandwidth(py::module_& module);

}  // namespace pycomm::bindings
