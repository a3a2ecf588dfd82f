// Calls whose tensors lie on a device: the group of the ranks there, and the streams around a call,
// as torch's own backends for devices promise them.
//
//   current   ... inputs are ready | event           wait(): event | what uses the results ...
//   group's                         wait | the call |
//   landing                                    wait | copies | event, futures
//
// Nothing here waits for a device, and no header of CUDA is seen: torch knows its devices behind
// c10::impl::VirtualGuardImpl, so that tests run all of it on devices that are emulated. Included
// by c10d_work.h and c10d_backend.h only.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c10d_python.h"
#include "bindings/c10d_tensors.h"
#include "group/group.h"

namespace pycomm::bindings {

namespace py = pybind11;

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// What a call on a device uses, and the moment on a stream when it is through: whoever started it
// may have dropped both. Any thread may call.
class Landing {
 public:
  // `stream`: what brings the results back runs there, behind the call.
  explicit Landing(const c10::Stream& stream) : stream_(stream), over_(stream.device_type()) {}
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  const c10::Stream& stream() const { return stream_; }

  // Tensors of the call live until the device has passed it, or until join().
  void hold(const Job& job) {
    const std::lock_guard lock(mutex_);
    for (const auto* some : {&job.inputs, &job.outputs, &job.held})
      held_.insert(held_.end(), some->begin(), some->end());
    for (const auto& [to, from] : job.copies) held_.insert(held_.end(), {to, from});
  }
  void add(std::shared_ptr<Work> work) {
    const std::lock_guard lock(mutex_);
    captured_ = captured_ || work->captured();
    works_.push_back(std::move(work));
  }

  // All that belongs to the call is on the stream.
  void land() {
    const std::lock_guard lock(mutex_);
    over_.record(stream_);
    landed_ = true;
  }
  // What is put on the thread's current stream from now on begins behind the call. After land().
  void join() {
    std::vector<at::Tensor> passed_on;  // dropped without the lock, as Python may be asked
    const std::lock_guard lock(mutex_);
    over_.block(current_stream(stream_.device()));
    passed_on.swap(held_);
  }
  // Of a graph that is captured no event may be asked: what it holds is for whoever launches it.
  bool captured() const {
    const std::lock_guard lock(mutex_);
    return captured_;
  }
  // A call that was given up passes on its stream as well: that is told first.
  bool passed() const {
    const auto done = [](const auto& work) { return work->done(); };
    const std::lock_guard lock(mutex_);
    try {
      return captured_ ||
             (landed_ && over_.query() && std::all_of(works_.begin(), works_.end(), done));
    } catch (const c10::Error&) {  // whoever uses the device next hears of it
      return true;
    }
  }
  // What became of the call after it was enqueued, or null.
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    for (const auto& work : works_)
      if (auto error = work->error()) return error;
    return nullptr;
  }

 private:
  mutable std::mutex mutex_;
  const c10::Stream stream_;
  c10::Event over_;
  bool landed_ = false, captured_ = false;
  std::vector<std::shared_ptr<Work>> works_;
  std::vector<at::Tensor> held_;
};

// How tensors on devices travel, as pycomm.Group has it.
struct DeviceOptions {
  int lanes = 1;
  std::string between_hosts = "nccl";
};

// What a backend has on one device.
struct DeviceSide {
  std::shared_ptr<Group> group;
  c10::Stream landing;
};

// Collective over `host`, whose ranks have a device each: the group of them. Python knows which
// devices there are, and how.
inline DeviceSide meet_on(const std::shared_ptr<Group>& host, c10::Device device,
                          const DeviceOptions& options, std::chrono::milliseconds timeout) {
  const auto landing = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return in_python([&]() -> DeviceSide {
    const py::object on_device = py::module_::import("pycomm.device_groups").attr("on_device");
    const py::capsule made = on_device(
        in_capsule(host), c10::DeviceTypeName(device.type(), true), int{device.index()},
        std::chrono::duration<double>(timeout).count(), options.lanes, options.between_hosts);
    return {*made.get_pointer<std::shared_ptr<Group>>(), landing};
  });
}

}  // namespace pycomm::bindings
