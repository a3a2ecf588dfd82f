// open_device(): a CUDA device for _core.on_device().
#include "bindings/cuda_device.h"

#include <pybind11/functional.h>

#include <functional>
#include <utility>

#include "bindings/capsule.h"
#include "cuda/cuda_device.h"

namespace pycomm::bindings {

void bind_device(py::module_& module) {
  module.def(
      "open_device",
      [](int index, std::function<void()> empty_caches) {
        return in_capsule(cuda::open_device(index, std::move(empty_caches)), "pycomm.Device");
      },
      py::arg("index"), py::arg("empty_caches") = py::none(),
      "Device `index`, for device groups. `empty_caches` frees the unused memory of other "
      "libraries; called, on any thread, where none is left. Raises Unsupported if there is no "
      "driver or no such GPU.");
}

}  // namespace pycomm::bindings
