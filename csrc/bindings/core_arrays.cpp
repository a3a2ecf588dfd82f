#include "bindings/core_arrays.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <atomic>
#include <string_view>

namespace pycomm::bindings {

namespace py = pybind11;
namespace {

std::atomic<TensorReader> read_tensor = nullptr;

std::optional<Dtype> by_bytes(Py_ssize_t bytes, std::optional<Dtype> one, Dtype two, Dtype four,
                              Dtype eight) {
  switch (bytes) {
    case 1:
      return one;
    case 2:
      return two;
    case 4:
      return four;
    case 8:
      return eight;
    default:
      return std::nullopt;
  }
}

// The dtype by NumPy's number of the type, which numpy/ndarraytypes.h fixes.
std::optional<Dtype> dtype_of(const py::dtype& type) {
  if (type.byteorder() != '=' && type.byteorder() != '|') return std::nullopt;
  switch (type.num()) {
    case 0:  // NPY_BOOL
      return Dtype::boolean;
    case 2:  // NPY_UBYTE
      return Dtype::uint8;
    case 1:  // NPY_BYTE, SHORT, INT, LONG, LONGLONG
    case 3:
    case 5:
    case 7:
    case 9:
      return by_bytes(type.itemsize(), Dtype::int8, Dtype::int16, Dtype::int32, Dtype::int64);
    case 11:  // NPY_FLOAT, DOUBLE, HALF
    case 12:
    case 23:
      return by_bytes(type.itemsize(), {}, Dtype::float16, Dtype::float32, Dtype::float64);
    default:  // unsupported, or defined by another module
      return std::nullopt;
  }
}

// NumPy's C interface takes a tenth of the time of the buffer protocol.
bool read_numpy(PyObject* x, bool write, ContiguousArray& into) {
  static std::atomic<PyTypeObject*> known = nullptr;  // numpy.ndarray, which is never unloaded
  if (Py_TYPE(x) != known) {
    if (known != nullptr || std::string_view(Py_TYPE(x)->tp_name) != "numpy.ndarray") return false;
    known = Py_TYPE(x);
  }
  const auto array = py::reinterpret_borrow<py::array>(x);
  if ((array.flags() & py::array::c_style) == 0 || (write && !array.writeable())) return false;
  const auto dtype = dtype_of(array.dtype());
  if (!dtype) return false;
  into = {.data = static_cast<std::byte*>(const_cast<void*>(array.data())),
          .dtype = *dtype,
          .count = static_cast<size_t>(array.size()),
          .shape = {array.shape(), static_cast<size_t>(array.ndim())}};
  return true;
}

}  // namespace

std::optional<ContiguousArray> read_array(PyObject* x, bool write) {
  ContiguousArray array;
  const TensorReader of_torch = read_tensor;
  if (read_numpy(x, write, array) || (of_torch != nullptr && of_torch(x, array))) return array;
  return std::nullopt;
}

bool are_apart(const ContiguousArray& a, const ContiguousArray& b) {
  const auto end = [](const ContiguousArray& x) { return x.data + x.count * bytes_of(x.dtype); };
  return end(a) <= b.data || end(b) <= a.data;
}

bool are_rows(const ContiguousArray& rows, const ContiguousArray& row, int rank, int size) {
  return rows.dtype == row.dtype && rows.shape.size() == row.shape.size() + 1 &&
         rows.shape[0] == size && std::ranges::equal(rows.shape.subspan(1), row.shape) &&
         (are_apart(rows, row) ||
          row.data == rows.data + static_cast<size_t>(rank) * row.count * bytes_of(row.dtype));
}

void set_tensor_reader(TensorReader reader) { read_tensor = reader; }

}  // namespace pycomm::bindings
