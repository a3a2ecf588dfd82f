// The module _core: the engine for Python. It takes pointers, counts and names; the package's
// Python files handle arrays, environment variables and defaults.
#include "bindings/core.h"

#include <pybind11/numpy.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "bindings/errors.h"

namespace pycomm::bindings {

bool interrupted() {
  if (gettid() != getpid() || Py_IsInitialized() == 0) return false;
  const py::gil_scoped_acquire gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  if (std::isnan(seconds) || seconds < 0)
    throw InvalidArgument("invalid timeout: expected a positive number of seconds, got " +
                          std::to_string(seconds));
  constexpr double kYears = 1e8;  // three years: nanoseconds do not overflow
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, kYears)));
}

}  // namespace pycomm::bindings

namespace {

// The address of a NumPy array's elements, ten times faster than x.ctypes.data.
uintptr_t address(const pybind11::array& array) {
  return reinterpret_cast<uintptr_t>(array.data());
}

}  // namespace

// csrc/bindings/core_*.cpp lock what the GIL protects: tests/reliability/test_concurrent_calls.py.
PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
  module.doc() = "The engine of pycomm. Private: use the functions of the package.";
  pybind11::register_exception_translator(&pycomm::bindings::translate);
  pycomm::bindings::bind_stores(module);
  pycomm::bindings::bind_group(module);
  pycomm::bindings::bind_devices(module);
  pycomm::bindings::bind_calls(module);
  pycomm::bindings::bind_cpu_kernels(module);
  pycomm::bindings::bind_memory(module);
  pycomm::bindings::bind_rows(module);
  module.def("address", &address);
  module.attr("compiler") = __VERSION__;
}
