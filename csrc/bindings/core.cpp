// The module _core: the engine for Python. It takes pointers, counts and names; the package's
// Python files handle arrays, environment variables and defaults.
#include "bindings/core.h"

#include <pybind11/numpy.h>

namespace {

// The address of a NumPy array's elements, ten times faster than x.ctypes.data.
uintptr_t address(const pybind11::array& array) {
  return reinterpret_cast<uintptr_t>(array.data());
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The engine of pycomm. Private: use the functions of the package.";
  pycomm::bindings::bind_errors();
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
