// _cuda.nccl: which NCCL there is, for `pycomm info`, for tests, and for groups on devices.
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

// A result that is no success, as an error.
void expect_success(NcclApi& nccl, const char* function, NcclResult result) {
  if (result == NcclResult::success) return;
  const std::string text = nccl_error_text(nccl, function, result, nullptr);
  if (result == NcclResult::cuda_error) {
    const std::string why = cuda::why_not();
    if (!why.empty()) throw Unsupported(text + "; NCCL needs NVIDIA's driver and a GPU: " + why);
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
      .def_property_readonly("origin", &NcclApi::origin, "The file that it was loaded from.")
      .def("unique_id", &unique_id, "128 bytes that name a communicator; needs no GPU.")
      .def("try_communicator", &try_communicator,
           "Makes a communicator of this process alone on the current device, and ends it. "
           "Raises Unsupported with NCCL's and CUDA's words where there is no GPU.")
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
      "The NCCL of the first place that has one: (in words, file, only if loaded).");
}

}  // namespace pycomm::bindings
