// _cuda: the CUDA kernels as functions of addresses, devices and NCCL. It loads on any machine;
// without a driver or GPU, calls raise Unsupported and `why_not` returns the reason.
#include <pybind11/pybind11.h>

#include "bindings/cuda_device.h"
#include "bindings/cuda_nccl.h"
#include "bindings/kernels.h"
#include "cuda/cuda_kernels.h"

PYBIND11_MODULE(_cuda, module) {
  static pycomm::cuda::CudaKernels cuda;
  pycomm::bindings::py::module_ kernels = module.def_submodule("kernels", "CUDA's kernels.");
  pycomm::bindings::bind_kernels(kernels, cuda);
  pycomm::bindings::py::module_ nccl = module.def_submodule("nccl", "NVIDIA's collectives.");
  pycomm::bindings::bind_nccl(nccl, [](std::span<const pycomm::nccl::NcclPlace> places) {
    return std::shared_ptr<pycomm::nccl::NcclApi>(pycomm::nccl::load_nccl(places));
  });
  pycomm::bindings::bind_device(module);
  module.def("why_not", &pycomm::cuda::why_not, "Why no GPU can be used; empty if one can.");
}
