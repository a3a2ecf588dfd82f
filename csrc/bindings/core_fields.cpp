#include "bindings/core_fields.h"

#include <array>
#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/core.h"

namespace pycomm::bindings {
namespace {

// Sets a field from a keyword argument.
struct Field {
  const char* name;
  void (*set)(group::Call& call, const py::handle& value);
  bool optional = false;  // None keeps the default
};

[[noreturn]] void refuse(const char* name, const py::handle& got, const std::string& expected) {
  PyErr_Clear();
  PyObject* const x = got.ptr();
  const bool plain = x == Py_None || PyBool_Check(x) != 0 || PyLong_CheckExact(x) != 0 ||
                     PyFloat_CheckExact(x) != 0 || PyUnicode_CheckExact(x) != 0;
  constexpr size_t kMost = 60;  // characters of the value; other texts may raise
  const auto text = py::reinterpret_steal<py::object>(plain ? PyObject_ASCII(x) : nullptr);
  PyErr_Clear();
  const auto shown =
      text ? text.cast<std::string>().substr(0, kMost) : std::string(Py_TYPE(x)->tp_name);
  throw InvalidArgument("invalid " + std::string(name) + ": got " + shown + ", expected " +
                        expected);
}

std::string_view text_of(const char* name, const py::handle& x) {
  Py_ssize_t bytes = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(x.ptr(), &bytes);
  if (text == nullptr) refuse(name, x, "a string");
  return {text, static_cast<size_t>(bytes)};
}

// An integer of Python or NumPy, from `low` to `high`.
int64_t integer_of(const char* name, const py::handle& x, int64_t low, int64_t high,
                   const char* expected) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(x.ptr()));
  int overflow = 0;
  const int64_t value = number ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : low - 1;
  if (overflow != 0 || value < low || value > high) refuse(name, x, expected);
  return value;
}

int peer_from(const group::Call& call, const py::handle& x) {
  const bool is_source = call.operation == Operation::recv ||
                         call.operation == Operation::broadcast ||
                         call.operation == Operation::scatter;
  return static_cast<int>(integer_of(is_source ? "src" : "dst", x, INT32_MIN, INT32_MAX, "a rank"));
}

}  // namespace

ReduceOp reduce_op_from(const py::handle& x) {
  if (PyUnicode_Check(x.ptr()) != 0) {
    const std::string_view name = text_of("op", x);
    if (name == "mean") return ReduceOp::avg;
    if (name == "prod") return ReduceOp::product;
    return find<ReduceOp>(kReduceOps, name, "op");
  }
  const py::object kind = py::getattr(x, "op", py::reinterpret_borrow<py::object>(x));
  const py::object text = py::getattr(kind, "name", py::none());
  if (PyUnicode_Check(text.ptr()) == 0)
    refuse("op", x, "one of: " + list(kReduceOps) + ", or a ReduceOp of torch");
  std::string name(text_of("op", text));
  for (char& letter : name) letter = static_cast<char>(std::tolower(letter));
  return find<ReduceOp>(kReduceOps, name, "op");
}

namespace {

// Reads one or two counts for each rank.
std::vector<size_t> counts_from(const py::handle& given) {
  std::vector<size_t> counts;
  for (const py::handle count : py::reinterpret_borrow<py::sequence>(given)) {
    if (py::cast<int64_t>(count) < 0)
      throw InvalidArgument("invalid count " + std::string(py::str(count)) +
                            ": it must be at least 0");
    counts.push_back(py::cast<size_t>(count));
  }
  if (counts.empty())
    throw InvalidArgument("invalid counts: got an empty list, expected one count for each rank");
  return counts;
}

std::chrono::nanoseconds timeout_from(const py::handle& given) {
  const double seconds = PyFloat_AsDouble(given.ptr());
  if (PyErr_Occurred() != nullptr || !(seconds > 0))
    refuse("timeout_s", given, "more than 0 seconds");
  return nanoseconds(seconds);
}

Algorithm algorithm_from(const py::handle& given) {
  const auto name = text_of("algorithm", given);
  if (name == "symmetric_memory")
    throw Unsupported(
        "the algorithm symmetric_memory was removed: omit it; NCCL 2.27 and newer has kernels of "
        "its own for symmetric memory");
  return find<Algorithm>(kAlgorithms, name, "algorithm");
}

// In the order in which errors are reported.
constexpr std::array<Field, 7> kFields{{
    {"timeout_s", [](group::Call& call, const py::handle& x) { call.timeout = timeout_from(x); },
     true},
    {"op", [](group::Call& call, const py::handle& x) { call.op = reduce_op_from(x); }},
    {"peer", [](group::Call& call, const py::handle& x) { call.peer = peer_from(call, x); }},
    {"tag",
     [](group::Call& call, const py::handle& x) {
       call.tag =
           static_cast<uint32_t>(integer_of("tag", x, 0, UINT32_MAX, "an integer to 2^32 - 1"));
     }},
    {"algorithm",
     [](group::Call& call, const py::handle& x) { call.algorithm = algorithm_from(x); }, true},
    {"counts", [](group::Call& call, const py::handle& x) { call.counts = counts_from(x); }, true},
    {"counts_fit",
     [](group::Call& call, const py::handle& x) { call.counts_fit = x.cast<bool>(); }},
}};

// Their names as Python's strings. Python interns the keywords of a program's text.
std::array<PyObject*, kFields.size()> interned{};

// The position of a keyword in kFields.
size_t field_of(PyObject* keyword) {
  for (size_t i = 0; i < kFields.size(); ++i)
    if (keyword == interned[i]) return i;
  for (size_t i = 0; i < kFields.size(); ++i)
    if (PyUnicode_CompareWithASCIIString(keyword, kFields[i].name) == 0) return i;
  throw py::type_error("Call() has no field '" + py::handle(keyword).cast<std::string>() + "'");
}

}  // namespace

void intern_field_names() {
  for (size_t i = 0; i < kFields.size(); ++i)
    interned[i] = PyUnicode_InternFromString(kFields[i].name);
}

group::Call call_from(PyObject* const* given, PyObject* keywords) {
  std::array<PyObject*, kFields.size()> values{};
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < count; ++i)
    values[field_of(PyTuple_GET_ITEM(keywords, i))] = given[1 + i];
  group::Call call;
  const py::handle operation = given[0];
  call.operation = find<Operation>(kOperations, text_of("operation", operation), "operation");
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] != nullptr && !(kFields[i].optional && values[i] == Py_None))
      kFields[i].set(call, values[i]);
  return call;
}

}  // namespace pycomm::bindings
