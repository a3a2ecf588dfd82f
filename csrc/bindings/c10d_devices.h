// Calls on device tensors: the group for the device, and the streams around a call, with the
// guarantees of torch's own device backends.
//
//   current   ... inputs are ready | event           wait(): event | what uses the results ...
//   group's                         wait | the call |
//   completion                                 wait | copies | event, futures
//
// Nothing here blocks on a device or includes a CUDA header: torch accesses its devices through
// c10::impl::VirtualGuardImpl, so tests run all of it on emulated devices. Events are the device
// group's: a query of torch's own ends a CUDA graph capture of another thread, and its events are
// made anew for each call.
#pragma once

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/functional.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/c10d_python.h"
#include "bindings/c10d_tensors.h"
#include "device/device.h"
#include "group/group.h"

namespace pycomm::bindings {

namespace py = pybind11;

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The completion of a device call: keeps what the call uses, and its end as an event on a stream.
// It may outlive the Work and its caller's tensors. Any thread may call.
class DeviceCompletion {
 public:
  // `stream`: where results are copied back, after the call. `over`: an event of its device.
  DeviceCompletion(const c10::Stream& stream, std::shared_ptr<device::Event> over)
      : stream_(stream), over_(std::move(over)) {}
  DeviceCompletion(const DeviceCompletion&) = delete;
  DeviceCompletion& operator=(const DeviceCompletion&) = delete;

  const c10::Stream& stream() const { return stream_; }

  // Keeps the call's tensors alive until the device has completed it, or until join().
  void hold(const Job& job) {
    const std::lock_guard lock(mutex_);
    for (const auto* some : {&job.inputs, &job.outputs, &job.held})
      held_.insert(held_.end(), some->begin(), some->end());
    for (const auto& [to, from] : job.copies) held_.insert(held_.end(), {to, from});
  }
  void add(std::shared_ptr<group::Work> work) {
    const std::lock_guard lock(mutex_);
    captured_ = captured_ || work->captured();
    works_.push_back(std::move(work));
  }

  // Records the end, once all work of the call is on the stream.
  void record() {
    const std::lock_guard lock(mutex_);
    over_->record(stream_.native_handle());
    recorded_ = true;
  }
  // Work put on the thread's current stream from now on begins after the call. Call it after
  // record().
  void join() {
    std::vector<at::Tensor> passed_on;  // destroyed unlocked: that may call Python
    const std::lock_guard lock(mutex_);
    over_->stream_wait(current_stream(stream_.device()).native_handle());
    passed_on.swap(held_);
  }
  // Events of a captured graph cannot be queried: the program that launches the graph waits for it.
  bool captured() const {
    const std::lock_guard lock(mutex_);
    return captured_;
  }
  // An aborted call passes its event too: check error() first.
  bool passed() const {
    const auto done = [](const auto& work) { return work->done(); };
    const std::lock_guard lock(mutex_);
    try {
      return captured_ ||
             (recorded_ && over_->passed() && std::all_of(works_.begin(), works_.end(), done));
    } catch (const Error&) {  // the next use of the device reports it
      return true;
    }
  }
  // The error of the call since it was enqueued, or null.
  std::exception_ptr error() const {
    const std::lock_guard lock(mutex_);
    for (const auto& work : works_)
      if (auto error = work->error()) return error;
    return nullptr;
  }

 private:
  mutable std::mutex mutex_;
  const c10::Stream stream_;
  const std::shared_ptr<device::Event> over_;
  bool recorded_ = false, captured_ = false;
  std::vector<std::shared_ptr<group::Work>> works_;
  std::vector<at::Tensor> held_;
};

// The device calls of a backend that may be under way, in their order.
class DeviceCompletions {
 public:
  // `ended`: called with the error of each call that is complete, or null.
  explicit DeviceCompletions(std::function<void(const std::exception_ptr&)> ended)
      : ended_(std::move(ended)) {}

  // Releases the complete calls first. A captured call cannot be queried, and is not kept.
  void add(std::shared_ptr<DeviceCompletion> completion) {
    if (completion->captured()) return;
    release();
    const std::lock_guard lock(mutex_);
    completions_.push_back(std::move(completion));
  }
  // Releases the complete calls.
  void release() {
    std::vector<std::shared_ptr<DeviceCompletion>> over;  // destroyed unlocked: may call Python
    const std::lock_guard lock(mutex_);
    for (; !completions_.empty(); completions_.pop_front()) {
      const auto error = completions_.front()->error();
      if (!error && !completions_.front()->passed()) return;
      ended_(error);
      over.push_back(std::move(completions_.front()));
    }
  }

 private:
  const std::function<void(const std::exception_ptr&)> ended_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<DeviceCompletion>> completions_;
};

// How device tensors are sent; see pycomm.Group.
struct DeviceOptions {
  int channels = 1;
  std::string internode_transport = "nccl";
  std::string agreement = "before";
};

// A backend's group and completion stream for one device.
struct DeviceState {
  std::shared_ptr<group::Collectives> group;
  std::function<void(double)> form_in_python;
  std::shared_ptr<void> stream;  // of this backend only
  c10::Stream completion;        // as torch names it

  // Collective: connects the ranks.
  void form(std::chrono::nanoseconds limit) const {
    if (group->formed()) return;
    in_python([&] { form_in_python(std::chrono::duration<double>(limit).count()); });
  }
};

// The devices that a backend has used. Any thread may call: another one may make the first call on
// a device.
class DeviceStates {
 public:
  struct Used {
    c10::Device device;
    std::shared_ptr<group::Collectives> group;
  };
  std::vector<Used> used() const {
    std::vector<Used> all;
    const std::lock_guard lock(mutex_);
    for (const auto& [device, state] : states_) all.push_back({device, state.group});
    return all;
  }
  bool any_broken() const {
    return std::ranges::any_of(used(), [](const Used& one) { return one.group->broken(); });
  }
  // `all`, and what the devices' groups sent: the host group counts their calls, about which the
  // ranks agree there.
  group::Stats with_traffic(group::Stats all) const {
    for (const auto& one : used()) {
      const group::Stats there = one.group->stats();
      all.frames_sent += there.frames_sent;
      all.bytes_sent += there.bytes_sent;
    }
    return all;
  }
  // Null if the device was not used. The state is valid until take().
  DeviceState* find(c10::Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = states_.find(device);
    return found == states_.end() ? nullptr : &found->second;
  }
  DeviceState& add(c10::Device device, DeviceState made) {
    const std::lock_guard lock(mutex_);
    return states_.try_emplace(device, std::move(made)).first->second;
  }
  // Removes all states, for the caller to destroy: that may call Python.
  std::unordered_map<c10::Device, DeviceState> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(states_, {});
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<c10::Device, DeviceState> states_;
};

// The group for `device` of the ranks of `host`. Python finds and opens the devices.
inline DeviceState make_device_state(const std::shared_ptr<group::Group>& host, c10::Device device,
                                     const DeviceOptions& options,
                                     std::chrono::milliseconds timeout) {
  return in_python([&]() -> DeviceState {
    const py::object on_device =
        py::module_::import("pycomm._core_api.device_groups").attr("on_device");
    const py::tuple made =
        on_device(group_capsule(host), c10::DeviceTypeName(device.type(), true),
                  int{device.index()}, std::chrono::duration<double>(timeout).count(),
                  options.channels, options.internode_transport, options.agreement);
    const py::capsule capsule = made[0];
    const auto group = *capsule.get_pointer<std::shared_ptr<group::Collectives>>();
    auto stream = group->take_stream();
    const py::object named = made[2](reinterpret_cast<uintptr_t>(stream.get()));
    return {group, made[1].cast<std::function<void(double)>>(), std::move(stream),
            c10::Stream::unpack3(named.attr("stream_id").cast<c10::StreamId>(), device.index(),
                                 device.type())};
  });
}

}  // namespace pycomm::bindings
