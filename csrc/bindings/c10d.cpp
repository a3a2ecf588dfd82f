// The torch.distributed backend on top of a pycomm::Group: a Python module for each version of
// torch, _c10d.torch_<major>_<minor>, which setup.py names in BACKEND_MODULE.
//
// This file and the c10d_*.h beside it are the only C++ that includes torch. They link nothing of
// pycomm: the group comes in a capsule from the module _core, and the reader of tensors goes there.
#include <pthread.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/c10d_backend.h"
#include "bindings/c10d_reconfigure.h"
#include "bindings/errors.h"
#include "group/group.h"

namespace pycomm::bindings {
namespace {

// The group in a capsule that _core.Group._capsule() made.
std::shared_ptr<group::Group> group_in(const py::capsule& capsule) {
  if (std::string_view(capsule.name()) != "pycomm.Group")
    throw py::type_error("invalid capsule: expected one of pycomm._core.Group");
  return *capsule.get_pointer<std::shared_ptr<group::Group>>();
}

c10::intrusive_ptr<Backend> backend_from(const py::capsule& capsule,
                                         const c10::intrusive_ptr<c10d::Store>& store,
                                         const c10::intrusive_ptr<Options>& options, bool owner,
                                         std::function<void()> ended) {
  return c10::make_intrusive<Backend>(group_in(capsule), store, options, owner, std::move(ended));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10::intrusive_ptr<ReconfigurableBackend> reconfigurable_from(
    const py::capsule& capsule, const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<Options>& options, std::function<void()> ended, int rank, int size,
    std::string handle, ReconfigurableBackend::Prepare prepare) {
  return c10::make_intrusive<ReconfigurableBackend>(group_in(capsule), store, options,
                                                    std::move(ended), rank, size, std::move(handle),
                                                    std::move(prepare));
}
#endif

py::dict stats(const Backend& backend) {
  const group::Stats now = backend.stats();
  using namespace pybind11::literals;
  return py::dict("calls"_a = now.calls, "frames_sent"_a = now.frames_sent,
                  "bytes_sent"_a = now.bytes_sent, "bytes_written"_a = now.bytes_written,
                  "bytes_received"_a = now.bytes_received, "seconds"_a = now.seconds);
}

}  // namespace
}  // namespace pycomm::bindings

PYBIND11_MODULE(BACKEND_MODULE, module) {
  using namespace pycomm::bindings;
  module.doc() = "pycomm for torch.distributed. Private: use pycomm.torch_backend.";
  py::register_exception_translator(&translate);
  pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
  py::module_::import("torch.distributed");  // registers the base classes
  py::module_::import("pycomm._core")
      .attr("set_tensor_reader")(
          py::capsule(reinterpret_cast<const void*>(&read_tensor), kTensorReader));

  module.def("close_all", [forks_at_creation = fork_count.load()] {
    if (forks_at_creation == fork_count) without_gil([] { open_groups.close_all(); });
  });
  const auto copy = [](const Options& options) { return c10::make_intrusive<Options>(options); };
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(module, "Options")
      .def(py::init([](milliseconds timeout, int channels, std::string internode_transport,
                       std::optional<bool> encrypt, std::string agreement,
                       std::optional<bool> thread_multiple, std::string replaces) {
             return c10::make_intrusive<Options>(
                 timeout,
                 DeviceOptions{channels, std::move(internode_transport), std::move(agreement)},
                 encrypt, thread_multiple, std::move(replaces));
           }),
           py::arg("timeout") = milliseconds(kBackendDefaultTimeout), py::arg("cuda_channels") = 1,
           py::arg("cuda_internode_transport") = "nccl", py::arg("encrypt") = py::none(),
           py::arg("cuda_agreement") = "before", py::arg("thread_multiple") = py::none(),
           py::arg("replaces") = "")
      .def_property_readonly("encrypt", [](const Options& o) { return o.encrypt; })
      .def_property_readonly("thread_multiple", [](const Options& o) { return o.thread_multiple; })
      .def_property_readonly("replaces", [](const Options& o) { return o.replaces; })
      .def_property_readonly("cuda_channels", [](const Options& o) { return o.devices.channels; })
      .def_property_readonly("cuda_internode_transport",
                             [](const Options& o) { return o.devices.internode_transport; })
      .def_property_readonly("cuda_agreement", [](const Options& o) { return o.devices.agreement; })
      // As of gloo's options, which programs read.
      .def_property_readonly("_devices", [](const Options&) { return std::vector<int>{}; })
      .def_property_readonly("_threads", [](const Options&) { return 2; })
      .def("__copy__", copy)
      .def("__deepcopy__",
           [copy](const Options& options, const py::dict&) { return copy(options); });
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(py::init(&backend_from), py::arg("capsule"), py::arg("store"), py::arg("options"),
           py::arg("owner"), py::arg("ended") = py::none())
      .def_property_readonly("options", &Backend::options)
      .def(
          "perform_nocolor_split", [](Backend&, const py::object& /*device*/) {},
          "Called on ranks that are not in a new group. Does nothing.")
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"))
      .def("_capsule", [](const Backend& backend) { return group_capsule(backend.group()); })
      .def("abandon_coalescing", &Backend::abandon_coalescing)
      .def("get_error", &Backend::getError)
      .def("register_abort_hook", &Backend::registerAbortHook, py::arg("hook_id"), py::arg("hook"))
      .def("unregister_abort_hook", &Backend::unregisterAbortHook, py::arg("hook_id"))
      .def("stats", &stats);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  py::class_<ReconfigurableBackend, c10::intrusive_ptr<ReconfigurableBackend>, Backend>(
      module, "ReconfigurableBackend")
      .def(py::init(&reconfigurable_from), py::arg("capsule"), py::arg("store"), py::arg("options"),
           py::arg("ended"), py::arg("rank"), py::arg("size"), py::arg("handle"),
           py::arg("prepare"));
#endif
}
