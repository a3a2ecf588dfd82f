// _cuda.nccl: the NCCL library, for `pycomm info`, tests and device groups.
#include "bindings/cuda_nccl.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/cuda_device.h"
#include "core/errors.h"
#include "cuda/cuda_kernels.h"

namespace pycomm::bindings {
namespace {

// Throws the error of a failed call.
void expect_success(NcclApi& nccl, const char* function, NcclResult result) {
  if (result == NcclResult::success) return;
  const std::string text = nccl_error_text(nccl, function, result, nullptr);
  if (result == NcclResult::cuda_error) {
    const std::string why = cuda::why_not();
    if (!why.empty()) throw Unsupported(text + "; NCCL requires NVIDIA's driver and a GPU: " + why);
  }
  throw InternalError(text);
}

py::bytes unique_id(NcclApi& nccl) {
  NcclId id{};
  expect_success(nccl, "ncclGetUniqueId", nccl.get_unique_id(id));
  return {id.bytes.data(), id.bytes.size()};
}

void try_communicator(NcclApi& nccl) {
  const py::gil_scoped_release release;
  NcclId id{};
  expect_success(nccl, "ncclGetUniqueId", nccl.get_unique_id(id));
  NcclComm* comm = nullptr;
  expect_success(nccl, "ncclCommInitRankConfig", nccl.comm_init_rank(comm, 1, id, 0, true));
  expect_success(nccl, "ncclCommFinalize", nccl.comm_finalize(comm));
  expect_success(nccl, "ncclCommDestroy", nccl.comm_destroy(comm));
}

using Place = std::tuple<std::string, std::string, bool>;

}  // namespace

void bind_nccl(py::module_& module,
               std::shared_ptr<NcclApi> (*load)(std::span<const NcclPlace> places)) {
  py::class_<NcclApi, std::shared_ptr<NcclApi>>(module, "Nccl", py::module_local(),
                                                "An NCCL library that was loaded.")
      .def_property_readonly("version",
                             [](const NcclApi& n) { return nccl_version_text(n.version()); })
      .def_property_readonly("origin", &NcclApi::origin, "The file it was loaded from.")
      .def("unique_id", &unique_id, "128 bytes that identify a communicator; requires no GPU.")
      .def("try_communicator", &try_communicator,
           "Creates a communicator of size 1 on the current device, and destroys it. "
           "Raises Unsupported with the messages of NCCL and CUDA if there is no GPU.")
      .def("_capsule",
           [](const std::shared_ptr<NcclApi>& n) { return in_capsule(n, "pycomm.NcclApi"); });
  module.def(
      "load",
      [load](const std::vector<Place>& places) {
        std::vector<NcclPlace> all;
        for (const auto& [what, file, loaded_only] : places)
          all.push_back({what, file, loaded_only});
        return load(all);
      },
      py::arg("places"),
      "NCCL from the first place that has it: (description, file, only if loaded).");
}

}  // namespace pycomm::bindings
