// _emulated: CUDA's kernels over the emulator, for tests in Python. The functions of `kernels` are
// those of _cuda, on host memory; each is over when it returns.
#include <pybind11/pybind11.h>

#include <string>
#include <tuple>

#include "bindings/kernels.h"
#include "cuda/cuda_kernels.h"
#include "grid.hpp"
#include "runtime.hpp"

namespace {

void set_order(const std::string& order, uint64_t seed, unsigned resident_blocks) {
  auto& options = emulator::options();
  options.order = order == "reverse"  ? emulator::Order::reverse
                  : order == "random" ? emulator::Order::random
                                      : emulator::Order::forward;
  options.seed = seed;
  options.resident_blocks = resident_blocks;
}

// (bytes loaded, bytes stored, launches) since the last call.
std::tuple<uint64_t, uint64_t, uint64_t> take_traffic() {
  const emulator::Traffic all = emulator::traffic();
  emulator::traffic() = {};
  return {all.loaded, all.stored, all.launches};
}

}  // namespace

PYBIND11_MODULE(_emulated, module) {
  static pycomm::cuda::CudaKernels cuda;
  emulator::options().eager = true;
  pycomm::bindings::py::module_ kernels = module.def_submodule("kernels");
  pycomm::bindings::bind_kernels(kernels, cuda);
  module.def("set_order", &set_order);
  module.def("take_traffic", &take_traffic);
  module.def("forget_failure", &emulator::forget_failure);
}
