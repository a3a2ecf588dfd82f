// Binds the loops of cuda/bandwidth.h, for benchmarks.
#include "bindings/cuda_device.h"
#include "bindings/kernels.h"
#include "cuda/bandwidth.h"

namespace pycomm::bindings {

void bind_bandwidth(py::module_& module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "stream_step",
      [](uintptr_t grad, uintptr_t u, uintptr_t v, size_t count, int device, uintptr_t stream) {
        cuda::stream_step(at<const float>(grad), at<float>(u), at<float>(v), count,
                          queue(device, stream));
      },
      Free());
  module.def(
      "stream_copy",
      [](uintptr_t from, uintptr_t to, size_t count, int device, uintptr_t stream) {
        cuda::stream_copy(at<const float>(from), at<float>(to), count, queue(device, stream));
      },
      Free());
  module.def(
      "stream_read",
      [](uintptr_t x, size_t count, uintptr_t most, int device, uintptr_t stream) {
        cuda::stream_read(at<const float>(x), count, at<unsigned>(most), queue(device, stream));
      },
      Free());
}

}  // namespace pycomm::bindings
