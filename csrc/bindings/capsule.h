// Capsules that pass C++ objects between the compiled modules.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace pycomm::bindings {

namespace py = pybind11;

// A capsule with a shared_ptr for another module's C++, which uses virtual functions only.
template <typename T>
py::capsule in_capsule(std::shared_ptr<T> object, const char* name) {
  const auto drop = [](PyObject* capsule) {
    delete static_cast<std::shared_ptr<T>*>(
        PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  };
  return py::capsule(new std::shared_ptr<T>(std::move(object)), name, drop);
}

}  // namespace pycomm::bindings
