// What the files of the module _core share: the handle that Python holds, and their entry points.
//
// Not an interface for other modules: those take the capsule and include group/group.h alone.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "group/group.h"
#include "os/fd.h"

namespace pycomm::bindings {

namespace py = pybind11;

// While it lives the GIL is free and the thread may block. A signal handler that raises meanwhile
// leaves its exception in the thread state, where throw_pending() finds it.
class Blocking {
 public:
  Blocking() = default;

 private:
  py::gil_scoped_release release_;
};

// Throws what a signal handler raised while the GIL was free. Needs the GIL.
inline void throw_pending() {
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

// Asked by the engine while a call waits: has a signal handler raised? Any thread, with or without
// the GIL; only Python's main thread runs handlers, so the others always hear no.
bool interrupted();

// The seconds that Python gives as the nanoseconds that the core takes. Throws InvalidArgument for
// negative numbers and NaN.
std::chrono::nanoseconds nanoseconds(double seconds);

// Memory of the heap that the ranks of this host map, as Python's arrays are made on it.
struct SharedMemory {
  std::shared_ptr<std::byte> memory;
  size_t bytes;
};

// Python's hold on a group. It keeps what asynchronous calls read and write alive until they are
// over, and refuses every call in a forked child, where the group's sockets are the parent's.
class Handle {
 public:
  explicit Handle(std::shared_ptr<Group> group);
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  Group& group() const;
  const std::shared_ptr<Group>& shared() const { return group_; }
  bool in_child() const { return forks() != born_; }
  // Keeps `arrays` until `work` is over.
  void keep(std::shared_ptr<Work> work, py::object arrays);

 private:
  struct Kept {
    std::shared_ptr<Work> work;
    py::object arrays;
  };
  std::shared_ptr<Group> group_;
  std::deque<Kept> kept_;  // in the order of the calls, which is the order in which they end
  unsigned born_;
};

template <size_t kSize>
std::string list(const std::array<std::string_view, kSize>& names) {
  std::string text;
  for (const auto name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

// Which entry of its table a name is. Throws InvalidArgument with the names that there are.
template <typename Enum, size_t kSize>
Enum find(const std::array<std::string_view, kSize>& names, std::string_view name,
          std::string_view what) {
  for (size_t i = 0; i < kSize; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  throw InvalidArgument("unknown " + std::string(what) + " '" + std::string(name) +
                        "'; one of: " + list(names));
}

void bind_errors();                          // core_errors.cpp
void bind_stores(py::module_& module);       // core_store.cpp
void bind_group(py::module_& module);        // core_group.cpp
void bind_devices(py::module_& module);      // core_devices.cpp
void bind_calls(py::module_& module);        // core_calls.cpp
void bind_cpu_kernels(py::module_& module);  // core_kernels.cpp
void bind_memory(py::module_& module);       // core_memory.cpp
void bind_rows(py::module_& module);         // core_rows.cpp

}  // namespace pycomm::bindings
