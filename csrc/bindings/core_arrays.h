// Arrays that need no view of Python's: contiguous, writable, in host memory or on a GPU, of a
// dtype that travels. Seen in a tenth of the time that pycomm.arrays takes; whatever is not so
// simple is left to it, and so are all explanations.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/dtype.h"

namespace pycomm::bindings {

// The elements of an array. It holds NumPy's arrays in place while it lives; whoever passes a
// tensor keeps it.
class ContiguousArray {
 public:
  static constexpr int kHost = -1;

  // Empty where `x` is no such array. No Python error is left behind.
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
  Py_buffer buffer_{};  // obj is null where there is none
};

}  // namespace pycomm::bindings
