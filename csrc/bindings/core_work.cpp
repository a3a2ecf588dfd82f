// _core.Work: a call that was started, the base of pycomm's Work. The type is written with Python's
// own interface, as _core.Call is: small messages are started and waited for in a microsecond.
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "bindings/core.h"

namespace pycomm::bindings {
namespace {

struct WorkObject {
  PyObject_HEAD std::shared_ptr<group::Work> work;
  std::shared_ptr<int> source;  // where a recv stores its sender; null: another call
  PyObject* result;
  PyObject* written;  // what wait() finishes: an ArrayRef, or null
  PyObject* array;    // an ArrayRef on a device, or null
};

PyTypeObject* work_type = nullptr;  // pycomm's Work, which lives as long as the process

WorkObject& work_of(PyObject* self) { return *reinterpret_cast<WorkObject*>(self); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  const WorkObject& one = work_of(self);
  Py_VISIT(one.result);
  Py_VISIT(one.written);
  Py_VISIT(one.array);
  return 0;
}

int clear(PyObject* self) {
  WorkObject& one = work_of(self);
  Py_CLEAR(one.result);
  Py_CLEAR(one.written);
  Py_CLEAR(one.array);
  return 0;
}

void free_work(PyObject* self) {
  PyObject_GC_UnTrack(self);
  (void)clear(self);
  work_of(self).work.~shared_ptr();
  work_of(self).source.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

template <typename Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (...) {
    return raise_current();
  }
}

PyObject* done(PyObject* self, PyObject* /*none*/) {
  return guarded([&] { return Py_NewRef(work_of(self).work->done() ? Py_True : Py_False); });
}

// wait_for_call(limit_s)
PyObject* wait(PyObject* self, PyObject* limit_s) {
  return guarded([&] {
    const auto limit = nanoseconds(py::handle(limit_s).cast<double>());
    const std::shared_ptr<group::Work> work = work_of(self).work;
    if (work->ended()) {
      work->wait(limit);
    } else {
      const Blocking blocking;
      work->wait(limit);
    }
    throw_pending();
    return Py_NewRef(Py_None);
  });
}

PyObject* make_stream_wait(PyObject* self, PyObject* stream) {
  return guarded([&] {
    work_of(self).work->make_stream_wait(
        reinterpret_cast<void*>(py::handle(stream).cast<uintptr_t>()));
    return Py_NewRef(Py_None);
  });
}

PyObject* source_of(PyObject* self, void* /*closure*/) {
  return guarded([&] {
    const WorkObject& one = work_of(self);
    const bool known = one.source && one.work->done() && !one.work->error();
    return known ? PyLong_FromLong(*one.source) : Py_NewRef(Py_None);
  });
}

template <auto kMember>
PyObject* get(PyObject* self, void* /*closure*/) {
  PyObject* const x = work_of(self).*kMember;
  return Py_NewRef(x != nullptr ? x : Py_None);
}

int set_written(PyObject* self, PyObject* x, void* /*closure*/) {
  PyObject* const old = work_of(self).written;
  work_of(self).written = x == Py_None ? nullptr : Py_XNewRef(x);
  Py_XDECREF(old);
  return 0;
}

}  // namespace

PyObject* raise_current() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

PyObject* make_work(std::shared_ptr<group::Work> work, std::shared_ptr<int> source,
                    std::array<PyObject*, 3> kept) {
  if (work_type == nullptr) throw std::runtime_error("pycomm is not imported");
  PyObject* const made = work_type->tp_alloc(work_type, 0);
  if (made == nullptr) throw py::error_already_set();
  WorkObject& one = work_of(made);
  new (&one.work) std::shared_ptr<group::Work>(std::move(work));
  new (&one.source) std::shared_ptr<int>(std::move(source));
  const auto member = [](PyObject* x) { return x == Py_None ? nullptr : Py_NewRef(x); };
  one.result = member(kept[0]);
  one.written = member(kept[1]);
  one.array = member(kept[2]);
  return made;
}

void bind_work(py::module_& module) {
  static std::array<PyMethodDef, 4> methods{
      {{"done", done, METH_NOARGS, nullptr},
       {"wait_for_call", wait, METH_O, nullptr},
       {"make_stream_wait", make_stream_wait, METH_O, nullptr}}};
  static std::array<PyGetSetDef, 5> properties{
      {{"source", source_of, nullptr, nullptr, nullptr},
       {"_result", get<&WorkObject::result>, nullptr, nullptr, nullptr},
       {"_written", get<&WorkObject::written>, set_written, nullptr, nullptr},
       {"_array", get<&WorkObject::array>, nullptr, nullptr, nullptr}}};
  static PyTypeObject type{};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);  // it is never freed
  type.tp_name = "pycomm._core.Work";
  type.tp_basicsize = sizeof(WorkObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
  type.tp_dealloc = free_work;
  type.tp_free = PyObject_GC_Del;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_methods = methods.data();
  type.tp_getset = properties.data();
  if (PyType_Ready(&type) != 0) throw py::error_already_set();
  module.add_object("Work", reinterpret_cast<PyObject*>(&type));
  module.def("set_work_type", [](const py::object& made) {
    work_type = reinterpret_cast<PyTypeObject*>(py::object(made).release().ptr());
  });
}

}  // namespace pycomm::bindings
