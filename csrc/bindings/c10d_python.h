// Calls of the backend into pycomm's Python, which passes a group in a capsule, as _core does.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "bindings/capsule.h"
#include "group/group.h"

namespace pycomm::bindings {

namespace py = pybind11;

// Calls `body` with the GIL. Python exceptions leave as torch's, see as_python().
template <typename Body>
auto in_python(const Body& body) {
  const py::gil_scoped_acquire gil;
  try {
    return body();
  } catch (py::error_already_set& raised) {
    raised.restore();
    python_error error;
    error.persist();
    throw python_error(error);
  }
}

// A capsule like that of _core.Group._capsule().
inline py::capsule group_capsule(const std::shared_ptr<group::Group>& group) {
  return in_capsule(group, "pycomm.Group");
}

// Registers a subgroup, so that it ends with the default group. Returns a function that unregisters
// it.
inline std::function<void()> attach(const std::shared_ptr<group::Group>& part,
                                    std::chrono::milliseconds timeout) {
  return in_python([&] {
    return py::module_::import("pycomm.torch_backend")
        .attr("register_backend")(group_capsule(part),
                                  std::chrono::duration<double>(timeout).count())
        .cast<std::function<void()>>();
  });
}

// The backend, a pointer of type `Made`, of a new group of the ranks that use `store`. Collective
// over them.
template <typename Made>
Made merged(const c10::intrusive_ptr<c10d::Store>& store,
            const c10::intrusive_ptr<c10d::Backend::Options>& options, int rank, int size) {
  return in_python([&] {
    return py::module_::import("pycomm.torch_backend")
        .attr("merge")(store, options, rank, size)
        .template cast<Made>();
  });
}

// The backend of a new group of the ranks of `group` that are not excluded. Collective over them.
template <typename Made>
Made shrunk(const std::shared_ptr<group::Group>& group,
            const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int64_t>& excluded,
            const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return in_python([&] {
    return py::module_::import("pycomm.torch_backend")
        .attr("shrink")(group_capsule(group), store, excluded, options)
        .template cast<Made>();
  });
}

}  // namespace pycomm::bindings
