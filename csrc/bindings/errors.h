// Converts errors of the core to the classes of pycomm.errors.
//
// _core registers the translator, also for _cuda, which is compiled with the same pybind11. So does
// the module of c10d, for itself and for torch's own bindings: torch brings another pybind11.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <string_view>

#include "core/errors.h"

namespace pycomm::bindings {

namespace py = pybind11;

// None if the field does not apply.
template <typename Value>
py::object field(const Value& value, const Value& absent) {
  if (value == absent) return py::none();
  return py::cast(value);
}

inline py::object to_python(const Error& error) {
  const auto& name = kErrorNames[static_cast<size_t>(error.kind())];
  const ErrorFields& fields = error.fields();
  // A text can contain bytes from another rank that are not UTF-8.
  const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      error.what(), static_cast<Py_ssize_t>(std::string_view(error.what()).size()), "replace"));
  py::object raised =
      py::module_::import("pycomm.errors").attr(py::str(name.data(), name.size()))(text);
  raised.attr("op") = field(fields.op, std::string());
  raised.attr("sequence") = field<int64_t>(fields.sequence, -1);
  raised.attr("rank") = field(fields.rank, -1);
  raised.attr("peer") = field(fields.peer, -1);
  raised.attr("elapsed_s") = field(fields.elapsed_s, 0.0);
  raised.attr("bytes") = field<int64_t>(fields.bytes, -1);
  raised.attr("unreachable") = field(fields.unreachable, -1);
  return raised;
}

// Nothing here may fail, because it runs during error handling. pybind11 requires a parameter by
// value.
inline void translate(std::exception_ptr thrown) {  // NOLINT(performance-unnecessary-value-param)
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    if (PyErr_Occurred() != nullptr) return;  // Ctrl-C ended the call: report that
    try {
      const py::object raised = to_python(error);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    } catch (py::error_already_set& other) {
      if (other.matches(PyExc_ImportError) || other.matches(PyExc_AttributeError))  // at shutdown
        PyErr_SetString(PyExc_RuntimeError, error.what());
      else
        other.restore();  // of a signal handler, such as KeyboardInterrupt
    } catch (...) {       // out of memory
      PyErr_Clear();
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  }
}

}  // namespace pycomm::bindings
