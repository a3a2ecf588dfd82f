// See core_arrays.h. Reads tensors through DLPack's table of C functions (DLPack 1.3,
// "dlpack_exchange_api") and NumPy arrays through the buffer protocol.
#include "bindings/core_arrays.h"

#include <cstdint>
#include <string_view>
#include <utility>

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
const DlApi* api_of(PyTypeObject* type) {
  static PyTypeObject* known[2] = {};
  static const DlApi* api = nullptr;
  if (type == known[0] || type == known[1]) return api;
  if (known[1] != nullptr) return nullptr;
  const std::string_view name = type->tp_name;
  if (name.find("Tensor") == name.npos && name.find("Parameter") == name.npos) return nullptr;
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* torch = PyDict_GetItemString(modules, "torch");
  PyObject* nn = PyDict_GetItemString(modules, "torch.nn");
  if (torch == nullptr || nn == nullptr) return nullptr;
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
  return type == known[0] || type == known[1] ? api : nullptr;
}

// Whether the tensor's memory holds its values: false for lazy views with the negative bit.
bool is_literal(PyObject* x) {
  static PyObject* name = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(x, name);
  const bool literal = answer == Py_False;
  Py_XDECREF(answer);
  return literal;
}

}  // namespace

std::optional<ContiguousArray> ContiguousArray::of(PyObject* x) {
  ContiguousArray plain;
  const bool seen = plain.see_tensor(x) || plain.see_buffer(x);
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  if (!seen) return std::nullopt;
  return plain;
}

ContiguousArray::ContiguousArray(ContiguousArray&& other) noexcept
    : data_(other.data_),
      dtype_(other.dtype_),
      count_(other.count_),
      shape_(other.shape_),
      gpu_(other.gpu_),
      buffer_(std::exchange(other.buffer_, Py_buffer{})) {}

ContiguousArray::~ContiguousArray() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool ContiguousArray::see_tensor(PyObject* x) {
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
  return true;
}

bool ContiguousArray::see_buffer(PyObject* x) {
  if (std::string_view(Py_TYPE(x)->tp_name) != "numpy.ndarray") return false;
  if (PyObject_GetBuffer(x, &buffer_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    buffer_ = {};
    return false;
  }
  const std::string_view format = buffer_.format == nullptr ? "B" : buffer_.format;
  if (format.size() != 1) return false;
  const auto bits = static_cast<uint8_t>(8 * buffer_.itemsize);
  const bool real = std::string_view("efd").find(format) != format.npos;
  const bool whole = std::string_view("bhilq").find(format) != format.npos;
  const auto dtype = format == "?"   ? std::optional(Dtype::boolean)
                     : format == "B" ? std::optional(Dtype::uint8)
                     : real          ? dtype_of(kDlFloat, bits)
                     : whole         ? dtype_of(kDlInt, bits)
                                     : std::nullopt;
  if (!dtype) return false;
  dtype_ = *dtype;
  data_ = static_cast<std::byte*>(buffer_.buf);
  count_ = static_cast<size_t>(buffer_.len / buffer_.itemsize);
  shape_ = {buffer_.shape, static_cast<size_t>(buffer_.ndim)};
  return true;
}

}  // namespace pycomm::bindings
