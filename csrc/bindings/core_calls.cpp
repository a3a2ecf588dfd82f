// Fast path of the most frequent calls in training: from a contiguous array to the group without
// checks of names, views and shapes in Python. pycomm.collectives tries it first.
//
// These functions use Python's fast calling convention: pybind11's dispatch (overloads,
// conversions) takes a quarter of the time of a 4-byte call.
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "bindings/core.h"
#include "bindings/core_arrays.h"

namespace pycomm::bindings {
namespace {

using Arguments = std::span<PyObject* const>;

// Like `find` in a table of names, but 0 for None.
Algorithm algorithm_from(const py::handle& name) {
  return name.is_none() ? Algorithm::automatic
                        : find<Algorithm>(kAlgorithms, name.cast<std::string_view>(), "algorithm");
}

// Returns false and does nothing if the array is not contiguous, or on a device.
bool go(const py::handle& handle, const py::handle& x, Call& call) {
  const auto plain = ContiguousArray::of(x.ptr());
  if (!plain || plain->gpu() != ContiguousArray::kHost) return false;
  call.dtype = plain->dtype();
  call.input = plain->data();
  call.output = plain->data();
  call.count = plain->count();
  Group& group = handle.cast<const Handle&>().group();
  {
    const Blocking blocking;
    group.run(call);
  }
  throw_pending();
  return true;
}

// group, array, op, algorithm, timeout_s
bool all_reduce(Arguments given) {
  Call call;
  call.operation = Operation::all_reduce;
  call.op = find<ReduceOp>(kReduceOps, py::handle(given[2]).cast<std::string_view>(), "op");
  call.algorithm = algorithm_from(given[3]);
  call.timeout = nanoseconds(py::handle(given[4]).cast<double>());
  return go(given[0], given[1], call);
}

// group, array, src, algorithm, timeout_s
bool broadcast(Arguments given) {
  Call call;
  call.operation = Operation::broadcast;
  call.peer = py::handle(given[2]).cast<int>();
  call.algorithm = algorithm_from(given[3]);
  call.timeout = nanoseconds(py::handle(given[4]).cast<double>());
  return go(given[0], given[1], call);
}

// The function that Python calls: runs `kBody` with its five arguments and converts errors.
template <bool (*kBody)(Arguments)>
PyObject* entry(PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) {
  try {
    check(count == 5, "a fast call requires five arguments");
    return PyBool_FromLong(kBody({given, static_cast<size_t>(count)}) ? 1 : 0);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

template <bool (*kBody)(Arguments)>
void bind(py::module_& module, const char* name) {
  // Python expects fast functions cast to the type of slow ones, as its documentation shows.
  static PyMethodDef method{
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry<kBody>)),
      METH_FASTCALL, nullptr};
  module.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
}

}  // namespace

void bind_calls(py::module_& module) {
  bind<all_reduce>(module, "all_reduce");
  bind<broadcast>(module, "broadcast");
}

}  // namespace pycomm::bindings
