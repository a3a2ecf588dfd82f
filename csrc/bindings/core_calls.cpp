// _core.Call: a call with named fields, and the only way from Python into a group.
//
// The type is written with Python's own interface: pybind11's dispatch (overloads, conversions)
// takes a quarter of the time of a 4-byte call.
#include <pybind11/critical_section.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "bindings/core_arrays.h"
#include "bindings/core_fields.h"

namespace pycomm::bindings {
namespace {

using Arguments = std::span<PyObject* const>;

struct CallObject {
  PyObject_HEAD group::Call call;  // without arrays, which run() and start() take
  vectorcallfunc vectorcall;
};

// What Python sets for calls. Python's objects live as long as the process, except `group`.
struct {
  std::atomic<PyObject*> fallback = nullptr;  // pycomm._core_api.calls.run
  std::atomic<PyObject*> profiler = nullptr;  // variables of torch's profiler, or null
  // Weak reference to the default group's handle, or null. A critical section of `lock` guards it.
  std::atomic<PyObject*> group = nullptr;
  PyObject* lock = nullptr;
  PyObject* core_name = nullptr;  // strings
  PyObject* profiler_flag = nullptr;
} python;

PyObject* run_or_fall_back(PyObject* self, PyObject* const* given, size_t flags,
                           PyObject* keywords);

// Call(operation, *, op=, peer=, ...)
PyObject* make_call(PyObject* type, PyObject* const* given, size_t flags, PyObject* keywords) {
  try {
    if (PyVectorcall_NARGS(flags) != 1) throw py::type_error("Call() takes one operation");
    group::Call call = call_from(given, keywords);
    auto* const made = PyObject_New(CallObject, reinterpret_cast<PyTypeObject*>(type));
    if (made == nullptr) throw py::error_already_set();
    new (&made->call) group::Call(std::move(call));
    made->vectorcall = run_or_fall_back;
    return reinterpret_cast<PyObject*>(made);
  } catch (...) {
    return raise_current();
  }
}

void free_call(PyObject* self) {
  reinterpret_cast<CallObject*>(self)->call.~Call();
  PyObject_Free(self);
}

PyObject* operation_of(PyObject* self, void* /*closure*/) {
  const auto name = name_of(reinterpret_cast<CallObject*>(self)->call.operation);
  return PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
}

PyObject* timeout_of(PyObject* self, void* /*closure*/) {
  const auto timeout = reinterpret_cast<CallObject*>(self)->call.timeout;
  return PyFloat_FromDouble(std::chrono::duration<double>(timeout).count());
}

// The memory of an argument.
struct Memory {
  std::byte* data = nullptr;
  Dtype dtype = Dtype::uint8;
  size_t count = 0;
};

// Reads None, an array in host memory or, if `described`, the description of any array: (address,
// dtype, count, owner), which pycomm._core_api.arrays makes. Empty if `x` needs such a description.
std::optional<Memory> memory_of(PyObject* x, bool write, bool described) {
  if (x == Py_None) return Memory{};
  if (described) {
    const auto description = py::reinterpret_borrow<py::tuple>(x);
    return Memory{.data = reinterpret_cast<std::byte*>(description[0].cast<uintptr_t>()),
                  .dtype = find<Dtype>(kDtypeNames, description[1].cast<std::string>(), "dtype"),
                  .count = description[2].cast<size_t>()};
  }
  const auto array = read_array(x, write);
  if (!array || array->gpu != ContiguousArray::kHost) return std::nullopt;
  return Memory{.data = array->data, .dtype = array->dtype, .count = array->count};
}

// Call::count for these arrays.
size_t count_of(const group::Call& call, const Memory& input, const Memory& output, int size) {
  if (!call.counts.empty()) return 0;
  switch (call.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
    case Operation::send:
    case Operation::all_gather:
    case Operation::gather:
      return input.count;
    case Operation::broadcast:
    case Operation::recv:
    case Operation::reduce_scatter:
    case Operation::scatter:
      return output.count;
    case Operation::all_to_all:
      return input.count / static_cast<size_t>(size);
    case Operation::barrier:
      break;
  }
  return 0;
}

// Sets the arrays of a call from the arguments of run() and start(). Those with a stream describe
// their arrays: without one they are a program's, which may pass any object. False if an array
// needs a description, or if a call has none and needs one.
bool set_arrays(group::Call& call, Arguments given, int size) {
  PyObject *const input = given[1], *const output = given[2];
  if (input == Py_None && output == Py_None) return call.operation == Operation::barrier;
  const bool described = given.size() == 4;
  const auto to = memory_of(output, true, described);
  const auto from = input == output ? to : memory_of(input, false, described);
  if (!from || !to) return false;
  call.dtype = input == Py_None ? to->dtype : from->dtype;
  call.input = from->data;
  call.output = to->data;
  call.count = count_of(call, *from, *to, size);
  return true;
}

// The arguments of run() and start(): group, input, output, and a stream for a device group.
group::Call call_of(PyObject* self, Arguments given) {
  if (given.size() != 3 && given.size() != 4)
    throw py::type_error("expected a group, an input, an output and perhaps a stream");
  group::Call call = reinterpret_cast<CallObject*>(self)->call;
  if (given.size() == 4)
    call.device.stream = reinterpret_cast<void*>(py::handle(given[3]).cast<uintptr_t>());
  return call;
}

// False, and nothing happens, if an array needs a description.
bool run_with(PyObject* self, Arguments given) {
  group::Call call = call_of(self, given);
  group::Collectives& group = handle_of(given[0]).collectives();
  if (!set_arrays(call, given, group.size())) return false;
  {
    const Blocking blocking;
    group.run(call);
  }
  throw_pending();
  return true;
}

PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    return Py_NewRef(run_with(self, {given, static_cast<size_t>(count)}) ? Py_True : Py_False);
  } catch (...) {
    return raise_current();
  }
}

// Whether the core can run a call with rows on these arrays as they are.
bool are_plain(const group::Call& call, PyObject* x, PyObject* out, int rank, int size) {
  const auto host = [](PyObject* array, bool write) {
    auto found = read_array(array, write);
    return found && found->gpu == ContiguousArray::kHost ? found : std::nullopt;
  };
  const Operation operation = call.operation;
  const bool others = call.peer != rank;
  if (operation == Operation::gather && others) return out == Py_None && host(x, false);
  const auto into = host(out, true);
  if (operation == Operation::scatter && others && x == Py_None) return into.has_value();
  const auto from = host(x, false);
  if (!into || !from) return false;
  if (operation == Operation::all_to_all)
    return from->dtype == into->dtype && std::ranges::equal(from->shape, into->shape) &&
           !from->shape.empty() && from->shape[0] == size && are_apart(*from, *into);
  const bool collects = operation == Operation::all_gather || operation == Operation::gather;
  return collects ? are_rows(*into, *from, rank, size) : are_rows(*from, *into, rank, size);
}

// Null, and nothing happens, if an array needs a description. `kept`: as for make_work().
PyObject* start_with(PyObject* self, Arguments given, std::array<PyObject*, 3> kept) {
  group::Call call = call_of(self, given);
  Handle& handle = handle_of(given[0]);
  group::Collectives& group = handle.collectives();
  if (!set_arrays(call, given, group.size())) return nullptr;
  std::shared_ptr<int> source;
  std::function<void(std::exception_ptr)> keep_source;
  if (call.operation == Operation::recv) {
    source = std::make_shared<int>(group::kAnySource);
    call.source = source.get();
    keep_source = [source](const std::exception_ptr&) {};
  }
  std::shared_ptr<group::Work> work;
  {
    const Blocking blocking;  // during a graph capture, start() waits for the other ranks
    work = group.start(call, std::move(keep_source));
  }
  // First: the call continues even if a signal handler raised.
  if (!work->ended()) handle.keep(work, py::make_tuple(py::handle(given[1]), py::handle(given[2])));
  throw_pending();
  return make_work(std::move(work), std::move(source), kept);
}

bool is_profiled() {
  PyObject* const profiler = python.profiler;
  // The object may be freed meanwhile: only its address is used.
  return profiler != nullptr && PyDict_GetItem(profiler, python.profiler_flag) != Py_False;
}

// The handle of a pycomm.Group, or of the default group for None. Empty if there is none.
py::object handle_in(PyObject* group) {
  if (group != Py_None)
    return py::reinterpret_steal<py::object>(PyObject_GetAttr(group, python.core_name));
  if (python.group == nullptr) return {};
  py::object reference;
  {
    const py::scoped_critical_section lock(python.lock);
    reference = py::reinterpret_borrow<py::object>(python.group);
  }
  if (!reference) return {};
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  (void)PyWeakref_GetRef(reference.ptr(), &found);
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* const found = PyWeakref_GetObject(reference.ptr());
  return py::reinterpret_borrow<py::object>(found == Py_None ? nullptr : found);
#endif
}

// call(group, input, output, result, async_op): runs the call and returns `result`, or starts it
// and returns a Work. Leaves to Python what the core cannot do itself.
PyObject* run_or_fall_back(PyObject* self, PyObject* const* given, size_t flags,
                           PyObject* keywords) {
  try {
    if (PyVectorcall_NARGS(flags) != 5 || keywords != nullptr)
      throw py::type_error("expected a group, an input, an output, a result and async_op");
    if ((given[4] == Py_False || given[4] == Py_True) && !is_profiled()) {
      const py::object handle = handle_in(given[0]);
      if (handle) {
        const std::array<PyObject*, 3> arguments{handle.ptr(), given[1], given[2]};
        if (given[4] == Py_True) {
          if (PyObject* const work = start_with(self, arguments, {given[3], Py_None, Py_None}))
            return work;
        } else if (run_with(self, arguments)) {
          return Py_NewRef(given[3]);
        }
      }
      PyErr_Clear();  // Python's side reports what is no group
    }
    PyObject* const fallback = python.fallback;
    if (fallback == nullptr) throw std::runtime_error("pycomm is not imported");
    const std::array<PyObject*, 6> arguments{given[0], self,     given[1],
                                             given[2], given[3], given[4]};
    return PyObject_Vectorcall(fallback, arguments.data(), arguments.size(), nullptr);
  } catch (...) {
    return raise_current();
  }
}

// run_rows(group, x, out): runs a call whose arrays have a row for each rank. False, and nothing
// happens, unless they are contiguous in host memory, fit each other and overlap in this rank's row
// alone.
PyObject* run_rows(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    const py::object handle = count == 3 && !is_profiled() ? handle_in(given[0]) : py::object();
    const group::Call& call = reinterpret_cast<CallObject*>(self)->call;
    bool runs = false;
    if (handle) {
      const group::Collectives& group = handle_of(handle.ptr()).collectives();
      const bool reads = call.operation != Operation::scatter || call.peer == group.rank();
      const std::array<PyObject*, 3> arguments{handle.ptr(), reads ? given[1] : Py_None, given[2]};
      runs = are_plain(call, given[1], given[2], group.rank(), group.size()) &&
             run_with(self, arguments);
    }
    PyErr_Clear();  // Python's side reports what is no group
    return Py_NewRef(runs ? Py_True : Py_False);
  } catch (...) {
    return raise_current();
  }
}

// start(group, input, output, stream, result, written, array): the Work of the call. A stream,
// which may be 0, says that the arrays are described. `written`, `array`: as in Work; None
// otherwise.
PyObject* start(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    if (count != 7) throw py::type_error("expected 7 arguments");
    const size_t arrays = given[3] == Py_None ? 3 : 4;
    PyObject* const work = start_with(self, {given, arrays}, {given[4], given[5], given[6]});
    return work != nullptr ? work : Py_NewRef(Py_None);
  } catch (...) {
    return raise_current();
  }
}

// Python expects fast functions cast to the type of slow ones, as its documentation shows.
PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

void bind_call(py::module_& module) {
  static std::array<PyMethodDef, 4> methods{{{"run", fast(run), METH_FASTCALL, nullptr},
                                             {"run_rows", fast(run_rows), METH_FASTCALL, nullptr},
                                             {"start", fast(start), METH_FASTCALL, nullptr}}};
  static std::array<PyGetSetDef, 3> properties{
      {{"operation", operation_of, nullptr, nullptr, nullptr},
       {"timeout_s", timeout_of, nullptr, nullptr, nullptr}}};
  static PyTypeObject type{};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);  // it is never freed
  type.tp_name = "pycomm._core.Call";
  intern_field_names();
  type.tp_basicsize = sizeof(CallObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_dealloc = free_call;
  type.tp_methods = methods.data();
  type.tp_getset = properties.data();
  type.tp_vectorcall = make_call;
  type.tp_call = PyVectorcall_Call;
  type.tp_vectorcall_offset = offsetof(CallObject, vectorcall);
  if (PyType_Ready(&type) != 0) throw py::error_already_set();
  module.add_object("Call", reinterpret_cast<PyObject*>(&type));
}

// For pycomm._core_api.arrays: (address, dtype, count, shape, GPU or -1), or None if the array
// needs a closer look.
py::object inspect(const py::handle& x, bool write) {
  const auto array = read_array(x.ptr(), write);
  if (!array) return py::none();
  py::tuple lengths(array->shape.size());
  for (size_t i = 0; i < array->shape.size(); ++i) lengths[i] = py::int_(array->shape[i]);
  return py::make_tuple(reinterpret_cast<uintptr_t>(array->data), name_of(array->dtype),
                        array->count, lengths, array->gpu);
}

}  // namespace

void bind_calls(py::module_& module) {
  python.lock = py::list().release().ptr();
  python.core_name = PyUnicode_InternFromString("core");
  python.profiler_flag = PyUnicode_InternFromString("_is_profiler_enabled");
  bind_work(module);
  bind_call(module);
  module.def("reduce_op_name", [](const py::handle& op) { return name_of(reduce_op_from(op)); });
  module.def("set_call_fallback",
             [](const py::function& run) { python.fallback = run.inc_ref().ptr(); });
  module.def("set_profiler", [](const py::module_& profiler) {
    python.profiler = py::object(profiler.attr("__dict__")).release().ptr();
  });
  module.def("set_default_group", [](const py::object& handle) {
    PyObject* const made = handle.is_none() ? nullptr : py::weakref(handle).release().ptr();
    py::object old;  // freed after the critical section
    const py::scoped_critical_section lock(python.lock);
    old = py::reinterpret_steal<py::object>(python.group.exchange(made));
  });
  module.def("inspect", &inspect);
  module.def("set_tensor_reader", [](const py::capsule& reader) {
    if (std::string_view(reader.name()) != kTensorReader)
      throw py::type_error("expected a reader of tensors");
    set_tensor_reader(reinterpret_cast<TensorReader>(reader.get_pointer()));
  });
}

}  // namespace pycomm::bindings
