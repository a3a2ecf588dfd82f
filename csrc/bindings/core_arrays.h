// Fast access to simple arrays: contiguous, writable, in host memory or on a GPU, with a supported
// dtype. It takes a tenth of the time of pycomm._core_api.arrays, which handles all other arrays
// and reports the errors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/dtype.h"

namespace pycomm::bindings {

// The elements of an array. It keeps NumPy arrays alive during its lifetime; the caller keeps
// tensors alive.
class ContiguousArray {
 public:
  static constexpr int kHost = -1;

  // Empty if `x` is not such an array. Leaves no Python error set.
  static std::optional<ContiguousArray> of(PyObject* x);
  ContiguousArray(ContiguousArray&& other) noexcept;
  ContiguousArray& operator=(ContiguousArray&&) = delete;
  ~ContiguousArray();

  std::byte* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  size_t count() const { return count_; }
  std::span<const int64_t> shape() const { return shape_; }  // the array's own
  int gpu() const { return gpu_; }                           // its number, or kHost

 private:
  ContiguousArray() = default;
  bool see_tensor(PyObject* x);
  bool see_buffer(PyObject* x);

  std::byte* data_ = nullptr;
  Dtype dtype_ = Dtype::uint8;
  size_t count_ = 0;
  std::span<const int64_t> shape_;
  int gpu_ = kHost;
  Py_buffer buffer_{};  // obj is null if unused
};

}  // namespace pycomm::bindings
