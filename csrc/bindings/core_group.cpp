// A group and its totals, for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/capsule.h"
#include "bindings/core.h"

namespace pycomm::bindings {
namespace {

PyTypeObject* group_type = nullptr;  // of GroupHandle

// A group whose destruction suits Python: without the GIL, because goodbyes may wait; and not in a
// forked child, where the goodbyes would be sent on the parent's sockets.
std::shared_ptr<group::Collectives> guarded(std::shared_ptr<group::Collectives> group) {
  group::Collectives* raw = group.get();
  return {raw,
          [group = std::move(group), forks_at_creation = os::forks()](group::Collectives*) mutable {
            if (os::forks() != forks_at_creation) {
              [[maybe_unused]] auto* leaked =
                  new std::shared_ptr<group::Collectives>(std::move(group));
            } else if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
              const py::error_scope pending;
              const Blocking blocking;
              group.reset();
            } else {
              group.reset();
            }
          }};
}

py::object split(const GroupHandle& handle, int color, int key) {
  std::shared_ptr<group::Group> part;
  {
    group::Group& group = handle.group();
    const Blocking blocking;
    part = group.split(color, key);
  }
  py::object held = py::none();
  if (part) held = py::cast(std::make_unique<GroupHandle>(std::move(part)));
  throw_pending();
  return held;
}

void form(const Handle& handle, double limit_s) {
  {
    const auto limit = nanoseconds(limit_s);
    const Blocking blocking;
    handle.collectives().form(limit);
  }
  throw_pending();
}

void close(const Handle& handle) {
  if (handle.in_child()) return;
  const Blocking blocking;
  handle.shared()->close();
}

void close_after_peers(const Handle& handle, double wait_s) {
  if (handle.in_child()) return;
  {
    const auto wait = nanoseconds(wait_s);
    const Blocking blocking;
    handle.shared()->close_after_peers(wait);
  }
  throw_pending();
}

void abort(const Handle& handle, const std::string& reason) {
  if (handle.in_child()) return;
  const Blocking blocking;
  handle.shared()->abort(reason);
}

py::capsule collectives_capsule(const Handle& handle) {
  handle.collectives();
  return in_capsule(handle.shared(), "pycomm.Collectives");
}

py::capsule group_capsule(const GroupHandle& handle) {
  handle.group();
  return in_capsule(std::static_pointer_cast<group::Group>(handle.shared()), "pycomm.Group");
}

py::dict status(const GroupHandle& handle) {
  const Status now = handle.group().status();
  py::list peers;
  for (const Status::Peer& peer : now.peers) {
    py::dict known;
    known["connected"] = peer.connected;
    known["left_reason"] = peer.left_reason;
    known["last_seen_s"] = peer.last_seen_s;
    known["current_call"] = peer.current_call;
    known["bytes_written"] = peer.bytes_written;
    known["bytes_received"] = peer.bytes_received;
    peers.append(known);
  }
  py::dict all;
  all["current_call"] = now.current_call;
  all["peers"] = peers;
  return all;
}

template <size_t kSize>
py::tuple names(const std::array<std::string_view, kSize>& table) {
  py::tuple all(kSize);
  for (size_t i = 0; i < kSize; ++i) all[i] = py::str(table[i].data(), table[i].size());
  return all;
}

void bind_records(py::module_& module) {
  py::class_<group::Stats>(module, "Stats")
      .def_readonly("calls", &group::Stats::calls)
      .def_readonly("frames_sent", &group::Stats::frames_sent)
      .def_readonly("bytes_sent", &group::Stats::bytes_sent)
      .def_readonly("bytes_written", &group::Stats::bytes_written)
      .def_readonly("bytes_received", &group::Stats::bytes_received)
      .def_readonly("seconds", &group::Stats::seconds)
      .def_readonly("bytes", &group::Stats::bytes_written)
      .def_property_readonly("algorithm",
                             [](const group::Stats& s) { return name_of(s.algorithm); })
      .def("__repr__", [](const group::Stats& s) {
        return py::str(
                   "Stats(calls={}, frames_sent={}, bytes_sent={}, bytes_written={}, "
                   "bytes_received={}, seconds={:.6f})")
            .format(s.calls, s.frames_sent, s.bytes_sent, s.bytes_written, s.bytes_received,
                    s.seconds);
      });
  py::class_<Member>(module, "Member")
      .def_readonly("host", &Member::host)
      .def_readonly("pid", &Member::pid)
      .def_readonly("transport", &Member::transport)
      .def_readonly("visible", &Member::visible)
      .def_readonly("started", &Member::started)
      .def("__repr__", [](const Member& m) {
        return py::str("Member(host={!r}, pid={}, transport={!r})")
            .format(m.host, m.pid, m.transport);
      });
}

}  // namespace

Handle::Handle(std::shared_ptr<group::Collectives> collectives)
    : collectives_(guarded(std::move(collectives))), forks_at_creation_(os::forks()) {}

Handle::~Handle() {
  collectives_.reset();  // first: no call may be in progress when the arrays are freed
  for (auto& kept : kept_)
    if (in_child() || !kept.work->done()) kept.arrays.release();  // the group is still in use: leak
}

group::Collectives& Handle::collectives() const {
  if (in_child())
    throw GroupBroken(
        "this process was forked after the group formed, and the group belongs to the parent; "
        "start processes with spawn");
  return *collectives_;
}

Handle& handle_of(PyObject* object) {
  // pybind11's cast looks a hash table up, which takes as long as a message between two ranks.
  auto* const instance = reinterpret_cast<py::detail::instance*>(object);
  if (Py_TYPE(object) == group_type && instance->simple_layout && instance->owned)
    return *static_cast<GroupHandle*>(instance->simple_value_holder[0]);
  if (!py::isinstance<Handle>(object))
    throw InvalidArgument("invalid group: got an object with a " +
                          std::string(Py_TYPE(object)->tp_name) + ", expected a pycomm.Group");
  return py::handle(object).cast<Handle&>();
}

void Handle::keep(std::shared_ptr<group::Work> work, py::object arrays) {
  std::vector<Kept> complete;  // freed after the lock: a destructor in Python may call keep()
  const std::lock_guard lock(mutex_);
  kept_.push_back({std::move(work), std::move(arrays)});
  if (kept_.size() < next_look_) return;
  const auto ended = std::partition(kept_.begin(), kept_.end(),
                                    [](const Kept& one) { return !one.work->ended(); });
  std::move(ended, kept_.end(), std::back_inserter(complete));
  kept_.erase(ended, kept_.end());
  constexpr size_t kFew = 16;  // of which all are looked at in each call
  next_look_ = kept_.size() < kFew ? 0 : 2 * kept_.size();
}

void bind_group(py::module_& module) {
  bind_records(module);
  module.attr("OPERATIONS") = names(kOperations);
  module.attr("DTYPES") = names(kDtypeNames);
  module.attr("REDUCE_OPS") = names(kReduceOps);
  module.attr("ALGORITHMS") = names(kAlgorithms);
  const auto info = [](const auto field) {
    return [field](const Handle& handle) { return handle.collectives().info().*field; };
  };
  py::class_<Handle>(module, "Collectives")
      .def_property_readonly("rank", info(&group::GroupInfo::rank))
      .def_property_readonly("size", info(&group::GroupInfo::size))
      .def_property_readonly("name", info(&group::GroupInfo::name))
      .def_property_readonly("members", info(&group::GroupInfo::members))
      .def_property_readonly("ranks", info(&group::GroupInfo::ranks))
      .def_property_readonly("hosts", info(&group::GroupInfo::hosts))
      .def_property_readonly("local_rank", info(&group::GroupInfo::local_rank))
      .def_property_readonly("local_size", info(&group::GroupInfo::local_size))
      .def_property_readonly("host_count", info(&group::GroupInfo::host_count))
      .def_property_readonly("encrypted", info(&group::GroupInfo::encrypted))
      .def_property_readonly("thread_multiple", info(&group::GroupInfo::thread_multiple))
      .def_property_readonly("forked", &Handle::in_child)
      .def_property_readonly("formed", [](const Handle& h) { return h.collectives().formed(); })
      .def("form", &form)
      .def("stats", [](const Handle& h) { return h.collectives().stats(); })
      .def("close", &close)
      .def("close_after_peers", &close_after_peers)
      .def("abort", &abort)
      .def("_capsule", &collectives_capsule);
  py::class_<GroupHandle, Handle> group(module, "Group");
  group_type = reinterpret_cast<PyTypeObject*>(group.ptr());
  group
      .def("allocate",
           [](const GroupHandle& handle, size_t bytes) -> std::optional<SharedMemory> {
             auto memory = handle.group().allocate(bytes);
             if (!memory) return std::nullopt;
             return SharedMemory{std::move(memory), bytes};
           })
      .def("split", &split)
      .def("lost", [](const GroupHandle& h) { return h.group().status().lost; })
      .def("status", &status)
      .def("set_timeout",
           [](const GroupHandle& h, double s) { h.group().set_timeout(nanoseconds(s)); })
      .def("_capsule", &group_capsule);
}

}  // namespace pycomm::bindings
