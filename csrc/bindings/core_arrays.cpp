// See core_arrays.h. Reads tensors through DLPack's table of C functions (DLPack 1.3,
// "dlpack_exchange_api") and NumPy arrays through NumPy's C interface, which takes a tenth of the
// time of the buffer protocol.
#include "bindings/core_arrays.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <atomic>
#include <cstdint>
#include <string_view>

namespace pycomm::bindings {

namespace py = pybind11;
namespace {

// The parts of DLPack's structures that are used here; their layout is fixed for major version 1.
struct DlTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t dimensions;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};
struct DlApi {
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void* unused[3];
  int (*tensor_from)(void* object, DlTensor* out);  // 0, or -1 and a Python error
};
constexpr int32_t kDlCpu = 1, kDlCuda = 2;
constexpr uint8_t kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4, kDlBool = 6;

std::optional<Dtype> dtype_of(uint8_t code, uint8_t bits) {
  const auto pick = [bits](Dtype b8, Dtype b16, Dtype b32, Dtype b64) {
    return bits == 8 ? b8 : bits == 16 ? b16 : bits == 32 ? b32 : b64;
  };
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) return std::nullopt;
  switch (code) {
    case kDlInt:
      return pick(Dtype::int8, Dtype::int16, Dtype::int32, Dtype::int64);
    case kDlFloat:
      if (bits == 8) return std::nullopt;
      return pick(Dtype::uint8, Dtype::float16, Dtype::float32, Dtype::float64);
    case kDlUint:
      return bits == 8 ? std::optional(Dtype::uint8) : std::nullopt;
    case kDlBfloat:
      return bits == 16 ? std::optional(Dtype::bfloat16) : std::nullopt;
    case kDlBool:
      return bits == 8 ? std::optional(Dtype::boolean) : std::nullopt;
    default:  // other codes are unsupported
      return std::nullopt;
  }
}

bool is_row_major(const DlTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t wanted = 1;
  for (int i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != wanted) return false;
    wanted *= tensor.shape[i];
  }
  return true;
}

// DLPack's table of torch.Tensor if `type` is exactly that type or torch.nn.Parameter: subclasses
// may store their elements elsewhere. Each type is checked once; torch's types live permanently.
// Threads that check at the same time store the same values.
const DlApi* api_of(PyTypeObject* type) {
  static std::atomic<PyTypeObject*> known[2] = {};
  static std::atomic<const DlApi*> api = nullptr;
  if (type == known[0] || type == known[1]) return api;
  if (known[1] != nullptr) return nullptr;
  const std::string_view name = type->tp_name;
  if (name.find("Tensor") == name.npos && name.find("Parameter") == name.npos) return nullptr;
  const auto torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
  const auto nn = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch.nn").ptr()));
  if (!torch || !nn) return nullptr;
  const auto tensor = py::getattr(torch, "Tensor", py::none());
  const auto parameter = py::getattr(nn, "Parameter", py::none());
  const auto capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* table =
      static_cast<const DlApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table->version.major != 1 || table->tensor_from == nullptr) return nullptr;
  api = table;
  known[0] = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  known[1] = reinterpret_cast<PyTypeObject*>(parameter.ptr());
  return type == known[0] || type == known[1] ? api.load() : nullptr;
}

// Whether the tensor's memory holds its values: false for lazy views with the negative bit.
bool is_literal(PyObject* x) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PyObject*> name;
  PyObject* answer = PyObject_CallMethodNoArgs(
      x, name.call_once_and_store_result([] { return PyUnicode_InternFromString("is_neg"); })
             .get_stored());
  const bool literal = answer == Py_False;
  Py_XDECREF(answer);
  return literal;
}

// Whether the storage has memory for all elements: a program may have resized it, as FSDP does.
// Asked for large tensors only, as it takes 2 us, 4 % of an all_reduce of 1 MiB.
bool storage_contains(PyObject* x, const std::byte* data, size_t bytes) {
  constexpr size_t kLarge = size_t{2} << 20;
  if (bytes == 0 || data == nullptr) return bytes == 0;
  if (bytes < kLarge) return true;
  const py::object storage = py::handle(x).attr("untyped_storage")();
  const auto begin = storage.attr("data_ptr")().cast<uintptr_t>();
  return reinterpret_cast<uintptr_t>(data) + bytes <=
         begin + storage.attr("nbytes")().cast<uintptr_t>();
}

// The dtype by NumPy's number of the type, which numpy/ndarraytypes.h fixes.
std::optional<Dtype> dtype_of(const py::dtype& type) {
  if (type.byteorder() != '=' && type.byteorder() != '|') return std::nullopt;
  const auto bits = static_cast<uint8_t>(8 * type.itemsize());
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
      return dtype_of(kDlInt, bits);
    case 11:  // NPY_FLOAT, DOUBLE, HALF
    case 12:
    case 23:
      return dtype_of(kDlFloat, bits);
    default:  // unsupported, or defined by another module
      return std::nullopt;
  }
}

}  // namespace

std::optional<ContiguousArray> ContiguousArray::of(PyObject* x, bool write) {
  ContiguousArray array;
  const bool known = array.read_numpy(x, write) || array.read_tensor(x);
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  if (!known) return std::nullopt;
  return array;
}

bool ContiguousArray::read_tensor(PyObject* x) {
  const DlApi* api = api_of(Py_TYPE(x));
  DlTensor tensor{};
  if (api == nullptr || api->tensor_from(x, &tensor) != 0) return false;
  const auto dtype = dtype_of(tensor.dtype.code, tensor.dtype.bits);
  const bool on_gpu = tensor.device.type == kDlCuda;
  if (!dtype || tensor.dtype.lanes != 1 || (tensor.device.type != kDlCpu && !on_gpu) ||
      !is_row_major(tensor) || !is_literal(x))
    return false;
  dtype_ = *dtype;
  data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  shape_ = {tensor.shape, static_cast<size_t>(tensor.dimensions)};
  count_ = 1;
  for (const int64_t length : shape_) count_ *= static_cast<size_t>(length);
  gpu_ = on_gpu ? tensor.device.id : kHost;
  return storage_contains(x, data_, count_ * bytes_of(dtype_));
}

bool ContiguousArray::read_numpy(PyObject* x, bool write) {
  static std::atomic<PyTypeObject*> type = nullptr;  // numpy.ndarray, which is never unloaded
  if (Py_TYPE(x) != type) {
    if (type != nullptr || std::string_view(Py_TYPE(x)->tp_name) != "numpy.ndarray") return false;
    type = Py_TYPE(x);
  }
  const auto array = py::reinterpret_borrow<py::array>(x);
  if ((array.flags() & py::array::c_style) == 0 || (write && !array.writeable())) return false;
  const auto dtype = dtype_of(array.dtype());
  if (!dtype) return false;
  dtype_ = *dtype;
  data_ = static_cast<std::byte*>(const_cast<void*>(array.data()));
  count_ = static_cast<size_t>(array.size());
  shape_ = {array.shape(), static_cast<size_t>(array.ndim())};
  return true;
}

}  // namespace pycomm::bindings
