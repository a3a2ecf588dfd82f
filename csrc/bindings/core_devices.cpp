// Device groups, created from a group, a device and an NCCL. The device and NCCL come in capsules
// from the module that has CUDA: _cuda, or the emulator's module in tests.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "bindings/core.h"
#include "device_group/device_group.h"

namespace pycomm::bindings {
namespace {

template <typename T>
std::shared_ptr<T> taken(const py::capsule& capsule, std::string_view name) {
  if (capsule.name() != name)
    throw py::type_error("invalid capsule: expected one of " + std::string(name));
  return *capsule.get_pointer<std::shared_ptr<T>>();
}

std::unique_ptr<Handle> on_device(const py::capsule& host, const py::capsule& device,
                                  const std::optional<py::capsule>& nccl,
                                  const std::string& why_no_nccl,
                                  const std::pair<bool, std::string>& nccl_sharing,
                                  const std::tuple<int, bool, bool>& options, double timeout_s) {
  const auto [channels, nccl_between_hosts, agree_after] = options;
  auto group = taken<group::Group>(host, "pycomm.Group");
  device_group::DeviceResources resources{
      .device = taken<device::Device>(device, "pycomm.Device"),
      .nccl = nccl ? taken<nccl::NcclApi>(*nccl, "pycomm.NcclApi") : nullptr,
      .why_no_nccl = why_no_nccl,
      .nccl_shares = nccl_sharing.first,
      .nccl_host_id = nccl_sharing.second,
      .options = {.channels = channels,
                  .nccl_between_hosts = nccl_between_hosts,
                  .agree_after = agree_after}};
  return std::make_unique<Handle>(device_group::make_device_group(
      std::move(group), std::move(resources), nanoseconds(timeout_s)));
}

}  // namespace

void bind_devices(py::module_& module) {
  module.def("group_of", [](const py::capsule& group) {
    return std::make_unique<GroupHandle>(taken<group::Group>(group, "pycomm.Group"));
  });
  module.def("on_device", &on_device);
  module.def("describe_device", [](const py::capsule& device) {
    return taken<device::Device>(device, "pycomm.Device")->description();
  });
}

}  // namespace pycomm::bindings
