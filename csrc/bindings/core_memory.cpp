// Shared memory for Python: an object with a buffer for arrays.
#include "bindings/core.h"
#include "os/shared_heap.h"

namespace pycomm::bindings {
namespace {

SharedMemory allocate(size_t bytes) {
  const auto heap = os::SharedHeap::own();
  if (!heap)
    throw Unsupported(
        "shared memory is unavailable: address space or file size is limited (ulimit -v, ulimit "
        "-f), or the system lacks memfd_create",
        {.op = "empty"});
  return {heap->allocate(bytes), bytes};
}

py::buffer_info buffer_of(const SharedMemory& shared) {
  return {shared.memory.get(), 1, py::format_descriptor<uint8_t>::format(),
          static_cast<py::ssize_t>(shared.bytes)};
}

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<SharedMemory>(module, "SharedMemory", py::buffer_protocol())
      .def(py::init(&allocate))
      .def_buffer(&buffer_of);
}

}  // namespace pycomm::bindings
