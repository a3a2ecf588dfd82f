// A group and its totals, for Python.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/core.h"

namespace pycomm::bindings {
namespace {

constexpr const char* kCapsule = "pycomm.Group";

// A group whose destruction suits Python: without the GIL, because goodbyes may wait; and not in a
// forked child, where the goodbyes would be sent on the parent's sockets.
std::shared_ptr<Group> guarded(std::shared_ptr<Group> group) {
  Group* raw = group.get();
  return {raw, [group = std::move(group), born = forks()](Group*) mutable {
            if (forks() != born) {
              [[maybe_unused]] auto* leaked = new std::shared_ptr<Group>(std::move(group));
            } else if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
              const py::error_scope pending;
              const Blocking blocking;
              group.reset();
            } else {
              group.reset();
            }
          }};
}

py::object split(const Handle& handle, int color, int key) {
  std::shared_ptr<Group> part;
  {
    Group& group = handle.group();
    const Blocking blocking;
    part = group.split(color, key);
  }
  py::object held = py::none();
  if (part) held = py::cast(std::make_unique<Handle>(std::move(part)));
  throw_pending();
  return held;
}

void close(const Handle& handle) {
  if (handle.in_child()) return;
  const Blocking blocking;
  handle.shared()->close();
}

void abort(const Handle& handle, const std::string& reason) {
  if (handle.in_child()) return;
  const Blocking blocking;
  handle.shared()->abort(reason);
}

py::capsule capsule(const Handle& handle) {
  handle.group();
  const auto drop = [](PyObject* object) {
    delete static_cast<std::shared_ptr<Group>*>(PyCapsule_GetPointer(object, kCapsule));
  };
  return py::capsule(new std::shared_ptr<Group>(handle.shared()), kCapsule, drop);
}

py::dict status(const Handle& handle) {
  const Status now = handle.group().status();
  py::list peers;
  for (const Status::Peer& peer : now.peers) {
    py::dict known;
    known["connected"] = peer.connected;
    known["left_reason"] = peer.departed;
    known["last_seen_s"] = peer.silent_s;
    known["current_call"] = peer.doing;
    known["bytes_written"] = peer.bytes_written;
    known["bytes_received"] = peer.bytes_received;
    peers.append(known);
  }
  py::dict all;
  all["current_call"] = now.doing;
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
  py::class_<Stats>(module, "Stats")
      .def_readonly("calls", &Stats::calls)
      .def_readonly("frames_sent", &Stats::frames_sent)
      .def_readonly("bytes_sent", &Stats::bytes_sent)
      .def_readonly("bytes_written", &Stats::bytes_written)
      .def_readonly("bytes_received", &Stats::bytes_received)
      .def_readonly("seconds", &Stats::seconds)
      .def_readonly("bytes", &Stats::bytes_written)
      .def_property_readonly("algorithm", [](const Stats& s) { return name_of(s.algorithm); })
      .def("__repr__", [](const Stats& s) {
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

Handle::Handle(std::shared_ptr<Group> group) : group_(guarded(std::move(group))), born_(forks()) {}

Handle::~Handle() {
  group_.reset();  // first: no call may be in progress when the arrays are freed
  for (auto& kept : kept_)
    if (in_child() || !kept.work->done()) kept.arrays.release();  // the group is still in use: leak
}

Group& Handle::group() const {
  if (in_child())
    throw GroupBroken(
        "this process was forked after the group formed, and the group belongs to the parent; "
        "start processes with spawn");
  return *group_;
}

void Handle::keep(std::shared_ptr<Work> work, py::object arrays) {
  while (!kept_.empty() && kept_.front().work->done()) kept_.pop_front();
  kept_.push_back({std::move(work), std::move(arrays)});
}

void bind_group(py::module_& module) {
  bind_records(module);
  module.attr("OPERATIONS") = names(kOperations);
  module.attr("DTYPES") = names(kDtypeNames);
  module.attr("REDUCE_OPS") = names(kReduceOps);
  module.attr("ALGORITHMS") = names(kAlgorithms);
  py::class_<Handle>(module, "Group")
      .def_property_readonly("rank", [](const Handle& h) { return h.group().rank(); })
      .def_property_readonly("size", [](const Handle& h) { return h.group().size(); })
      .def_property_readonly("name", [](const Handle& h) { return h.group().name(); })
      .def_property_readonly("members", [](const Handle& h) { return h.group().members(); })
      .def_property_readonly("ranks", [](const Handle& h) { return h.group().ranks(); })
      .def_property_readonly("local_rank", [](const Handle& h) { return h.group().local_rank(); })
      .def_property_readonly("local_size", [](const Handle& h) { return h.group().local_size(); })
      .def_property_readonly("host_count", [](const Handle& h) { return h.group().host_count(); })
      .def_property_readonly("encrypted", [](const Handle& h) { return h.group().encrypted(); })
      .def_property_readonly("hosts", [](const Handle& h) { return h.group().hosts(); })
      .def("allocate",
           [](const Handle& handle, size_t bytes) -> std::optional<SharedMemory> {
             auto memory = handle.group().allocate(bytes);
             if (!memory) return std::nullopt;
             return SharedMemory{std::move(memory), bytes};
           })
      .def_property_readonly("forked", &Handle::in_child)
      .def("split", &split)
      .def("lost", [](const Handle& h) { return h.group().lost(); })
      .def("stats", [](const Handle& h) { return h.group().stats(); })
      .def("status", &status)
      .def("set_timeout", [](const Handle& h, double s) { h.group().set_timeout(nanoseconds(s)); })
      .def("close", &close)
      .def("abort", &abort)
      .def("_capsule", &capsule);
}

}  // namespace pycomm::bindings
