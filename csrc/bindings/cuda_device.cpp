// open_device(index): a CUDA device for _core.on_device().
#include "bindings/cuda_device.h"

#include "bindings/capsule.h"
#include "cuda/cuda_device.h"

namespace pycomm::bindings {

void bind_device(py::module_& module) {
  module.def(
      "open_device",
      [](int index) { return in_capsule(cuda::open_device(index), "pycomm.Device"); },
      py::arg("index"),
      "Device `index`, for device groups. Raises Unsupported if there is no driver or no such "
      "GPU.");
}

}  // namespace pycomm::bindings
