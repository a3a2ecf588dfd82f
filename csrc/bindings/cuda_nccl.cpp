// _cuda.nccl: the NCCL library, for `pycomm info`, tests and device groups.
#include "bindings/cuda_nccl.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/capsule.h"
#include "core/errors.h"
#include "cuda/cuda_kernels.h"

namespace pycomm::bindings {
namespace {

// Throws the error of a failed call.
void expect_success(nccl::NcclApi& nccl, const char* function, nccl::NcclResult result) {
  if (result == nccl::NcclResult::success) return;
  const std::string text = nccl::nccl_error_text(nccl, function, result);
  if (result == nccl::NcclResult::cuda_error) {
    const std::string why = cuda::why_not();
    if (!why.empty()) throw Unsupported(text + "; NCCL requires NVIDIA's driver and a GPU: " + why);
  }
  throw InternalError(text);
}

py::bytes unique_id(nccl::NcclApi& nccl) {
  nccl::NcclId id{};
  expect_success(nccl, "ncclGetUniqueId", nccl.get_unique_id(id));
  return {id.bytes.data(), id.bytes.size()};
}

void try_communicator(nccl::NcclApi& nccl) {
  const py::gil_scoped_release release;
  nccl::NcclId id{};
  expect_success(nccl, "ncclGetUniqueId", nccl.get_unique_id(id));
  nccl::NcclComm* comm = nullptr;
  expect_success(nccl, "ncclCommInitRankConfig", nccl.comm_init_rank(comm, 1, id, 0, {}));
  expect_success(nccl, "ncclCommDestroy", nccl.comm_destroy(comm));
}

using Place = std::tuple<std::string, std::string, bool>;

}  // namespace

void bind_nccl(py::module_& module,
               std::shared_ptr<nccl::NcclApi> (*load)(std::span<const nccl::NcclPlace> places)) {
  py::class_<nccl::NcclApi, std::shared_ptr<nccl::NcclApi>>(module, "Nccl", py::module_local(),
                                                            "An NCCL library that was loaded.")
      .def_property_readonly(
          "version", [](const nccl::NcclApi& n) { return nccl::nccl_version_text(n.version()); })
      .def_property_readonly("origin", &nccl::NcclApi::origin, "The file it was loaded from.")
      .def("unique_id", &unique_id, "128 bytes that identify a communicator; requires no GPU.")
      .def("try_communicator", &try_communicator,
           "Creates a communicator of size 1 on the current device, and destroys it. "
           "Raises Unsupported with the messages of NCCL and CUDA if there is no GPU.")
      .def("_capsule",
           [](const std::shared_ptr<nccl::NcclApi>& n) { return in_capsule(n, "pycomm.NcclApi"); });
  module.def(
      "load",
      [load](const std::vector<Place>& places) {
        std::vector<nccl::NcclPlace> all;
        for (const auto& [what, file, loaded_only] : places)
          all.push_back({what, file, loaded_only});
        return load(all);
      },
      py::arg("places"),
      "NCCL from the first place that has it: (description, file, only if loaded).");
}

}  // namespace pycomm::bindings
