// open_device(index): a CUDA device as _core.on_device() takes it.
#include "bindings/cuda_device.h"

#include "cuda/cuda_device.h"

namespace pycomm::bindings {

void bind_device(py::module_& module) {
  module.def(
      "open_device",
      [](int index) { return in_capsule(cuda::open_device(index), "pycomm.Device"); },
      py::arg("index"),
      "Device `index`, for groups on it. Raises Unsupported where there is no driver or no such "
      "GPU.");
}

}  // namespace pycomm::bindings
