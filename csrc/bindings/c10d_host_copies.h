// Calls on tensors of a device that no module of pycomm serves: through host memory, by torch's own
// copies.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "bindings/c10d_options.h"
#include "bindings/c10d_python.h"
#include "bindings/c10d_tensors.h"

namespace pycomm::bindings {

// Host memory in place of a job's memory on a device: for each storage, of the part in use.
class HostCopies {
 public:
  // Whether tensors on `device` are copied through host memory: in place of gloo, as gloo does it.
  static bool needed(c10::Device device, const Options& options, DeviceStates& states) {
    if (device.is_cpu() || options.replaces.empty() || states.find(device)) return false;
    return in_python([&] {
      return py::module_::import("pycomm._core_api.device_groups")
          .attr("is_unknown")(c10::DeviceTypeName(device.type(), true))
          .cast<bool>();
    });
  }

  // Makes a job on such a device one in host memory, whose last copies are those to the device.
  // Waits for the device's current stream.
  static void take_over_if_needed(Job& job, const Options& options, DeviceStates& states) {
    if (!job.device || !needed(*job.device, options, states)) return;
    const BelowAutograd guard;
    const HostCopies copies(job);
    for (group::Call& call : job.calls) {
      call.input = copies.host(call.input);
      call.output = copies.host(call.output);
    }
    for (auto& [to, from] : job.copies) {
      to = copies.host(to);
      from = copies.host(from);
    }
    if (job.type != c10d::OpType::SEND)  // its outputs are its inputs
      for (const auto& output : job.outputs)
        if (is_used(output)) job.copies.emplace_back(output, copies.host(output));
    for (const auto& [storage, part] : copies.parts_) job.held.push_back(part.memory);
    job.device = at::kCPU;
  }

 private:
  struct Part {
    char *begin, *end;  // on the device
    at::Tensor memory;
  };

  explicit HostCopies(const Job& job) {
    std::vector<at::Tensor> used;
    for (const auto* some : {&job.inputs, &job.outputs, &job.held})
      std::ranges::copy_if(*some, std::back_inserter(used), is_used);
    for (const auto& [to, from] : job.copies)
      if (is_used(from)) used.push_back(from);
    for (const auto& tensor : used) {
      const auto [begin, end] = memory_of(tensor);
      Part& part = parts_.try_emplace(key(tensor), Part{begin, end, {}}).first->second;
      part.begin = std::min(part.begin, begin);
      part.end = std::max(part.end, end);
    }
    for (auto& [storage, part] : parts_)
      part.memory = at::empty({part.end - part.begin}, at::kByte);
    std::set<std::pair<char*, char*>> done;
    for (const auto& tensor : used)
      if (const auto [begin, end] = memory_of(tensor); done.emplace(begin, end).second)
        host(tensor).copy_(tensor);
  }

  // The calls know only the memory of such tensors: others have a copy among the job's.
  static bool is_used(const at::Tensor& tensor) {
    return tensor.numel() > 0 && !tensor.is_cpu() && is_plain(tensor);
  }
  static const void* key(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  // The host memory for a pointer of a call, or the pointer of a call without elements.
  template <typename Pointer>
  Pointer host(Pointer device) const {
    for (const auto& [storage, part] : parts_) {
      const auto* const at = static_cast<const char*>(device);
      if (at >= part.begin && at < part.end) return bytes_at(part.memory) + (at - part.begin);
    }
    return device;
  }
  // The tensor there, or the tensor itself if the calls do not know it.
  at::Tensor host(const at::Tensor& tensor) const {
    const auto part = is_used(tensor) ? parts_.find(key(tensor)) : parts_.end();
    if (part == parts_.end()) return tensor;
    return at::from_blob(host(bytes_at(tensor)), tensor.sizes(), tensor.options().device(at::kCPU));
  }

  std::map<const void*, Part> parts_;  // by storage
};

}  // namespace pycomm::bindings
