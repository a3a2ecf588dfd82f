// The module _core: the engine as Python sees it. Pointers, counts and names go in; what arrays,
// environments and defaults are is the business of the Python files beside it.
#include "bindings/core.h"

#include <pybind11/numpy.h>

namespace {

// Where the elements of a NumPy array begin; x.ctypes.data says the same in ten times the time.
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
