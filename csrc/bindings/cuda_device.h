// Bindings of cuda_device.cpp and cuda_bandwidth.cpp for device groups and benchmarks, shared by
// cuda.cpp and the emulator in tests/emulator.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>

namespace pycomm::bindings {

namespace py = pybind11;

// A capsule with a shared_ptr for another module's C++, which uses virtual functions only.
template <typename T>
py::capsule in_capsule(std::shared_ptr<T> object, const char* name) {
  const auto drop = [](PyObject* capsule) {
    const char* named = PyCapsule_GetName(capsule);
    delete static_cast<std::shared_ptr<T>*>(PyCapsule_GetPointer(capsule, named));
  };
  return py::capsule(new std::shared_ptr<T>(std::move(object)), name, drop);
}

void bind_device(py::module_& module);
void bind_streams(py::module_& module);

}  // namespace pycomm::bindings
