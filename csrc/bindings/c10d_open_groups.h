// The groups of this process that backends own. They are closed when the interpreter ends.
#pragma once

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings/c10d_python.h"
#include "group/group.h"

namespace pycomm::bindings {

inline std::atomic<unsigned> fork_count{0};

// Releases the GIL if this thread holds it: a goodbye may wait, and the worker may need the GIL.
template <typename Body>
void without_gil(const Body& body) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return body();
  const py::gil_scoped_release release;
  body();
}

// The groups that backends own, closed when the interpreter ends.
class OpenGroups {
 public:
  void add(const std::shared_ptr<group::Collectives>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& old) { return old.expired(); });
    groups_.push_back(group);
  }
  // In reverse order: device groups use the host groups made before them.
  void close_all() {
    const std::lock_guard lock(mutex_);
    for (auto weak = groups_.rbegin(); weak != groups_.rend(); ++weak)
      if (const auto group = weak->lock()) group->close();
    groups_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<group::Collectives>> groups_;
};
inline OpenGroups open_groups;

}  // namespace pycomm::bindings
