// Shared by the files of the module _core: Python's handle of a group, and the binding functions.
//
// Other modules must not include it: they use the capsule and group/group.h only.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/names.h"
#include "group/group.h"
#include "os/fd.h"

namespace pycomm::bindings {

namespace py = pybind11;

// Releases the GIL during its lifetime; the thread may block. If a signal handler raises meanwhile,
// the exception stays in the thread state for throw_pending().
class Blocking {
 public:
  Blocking() : state_(PyEval_SaveThread()) {}
  Blocking(const Blocking&) = delete;
  Blocking& operator=(const Blocking&) = delete;
  ~Blocking() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Throws what a signal handler raised while the GIL was released. Requires the GIL.
inline void throw_pending() {
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

// Polled by the engine while a call waits: whether a signal handler raised. Any thread, with or
// without the GIL. Only Python's main thread runs handlers, so others always get false.
bool interrupted();

// Converts Python's seconds to nanoseconds. Throws InvalidArgument for negative numbers and NaN.
std::chrono::nanoseconds nanoseconds(double seconds);

// Memory of the heap that the ranks of this host share, as a buffer for Python arrays.
struct SharedMemory {
  std::shared_ptr<std::byte> memory;
  size_t bytes;
};

// Python's handle of a group or a device group. It keeps the arrays of asynchronous calls alive
// until they complete, and rejects every call in a forked child, where the parent owns the group's
// sockets.
class Handle {
 public:
  explicit Handle(std::shared_ptr<group::Collectives> collectives);
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  group::Collectives& collectives() const;
  const std::shared_ptr<group::Collectives>& shared() const { return collectives_; }
  bool in_child() const { return os::forks() != forks_at_creation_; }
  // Keeps `arrays` alive until `work` is complete. Any thread.
  void keep(std::shared_ptr<group::Work> work, py::object arrays);

 private:
  struct Kept {
    std::shared_ptr<group::Work> work;
    py::object arrays;
  };
  std::shared_ptr<group::Collectives> collectives_;
  std::mutex mutex_;  // guards kept_; not held while Python objects are freed
  std::vector<Kept> kept_;
  size_t next_look_ = 0;  // how many there are when those that are complete are freed next
  unsigned forks_at_creation_;
};

class GroupHandle : public Handle {
 public:
  explicit GroupHandle(std::shared_ptr<group::Group> group) : Handle(std::move(group)) {}
  group::Group& group() const { return static_cast<group::Group&>(collectives()); }
};

// Converts the error that is being handled; returns null, as Python expects after an error.
PyObject* raise_current();

// A Work of pycomm. `source`: where a recv stores its sender, else null. `kept`: the result; what
// wait() finishes, or None; the array on a device, or None.
PyObject* make_work(std::shared_ptr<group::Work> work, std::shared_ptr<int> source,
                    std::array<PyObject*, 3> kept);

// The handle in a Python object. Throws if it is none.
Handle& handle_of(PyObject* object);

void bind_stores(py::module_& module);       // core_store.cpp
void bind_group(py::module_& module);        // core_group.cpp
void bind_devices(py::module_& module);      // core_devices.cpp
void bind_calls(py::module_& module);        // core_calls.cpp
void bind_work(py::module_& module);         // core_work.cpp
void bind_cpu_kernels(py::module_& module);  // core_kernels.cpp
void bind_memory(py::module_& module);       // core_memory.cpp
void bind_rows(py::module_& module);         // core_rows.cpp

}  // namespace pycomm::bindings
