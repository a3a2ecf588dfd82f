// The inspector of arrays: reads tensors and NumPy arrays that are contiguous, in host memory or on
// a GPU, with a supported dtype. pycomm._core_api.arrays copies or describes all others and reports
// the errors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/dtype.h"

namespace pycomm::bindings {

// The elements of an array, which the caller keeps alive.
class ContiguousArray {
 public:
  static constexpr int kHost = -1;

  // Empty if `x` is not such an array, or `write` and it is read-only. Leaves no Python error set.
  static std::optional<ContiguousArray> of(PyObject* x, bool write = true);

  std::byte* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  size_t count() const { return count_; }
  std::span<const int64_t> shape() const { return shape_; }  // the array's own
  int gpu() const { return gpu_; }                           // its number, or kHost

 private:
  ContiguousArray() = default;
  bool read_tensor(PyObject* x);
  bool read_numpy(PyObject* x, bool write);

  std::byte* data_ = nullptr;
  Dtype dtype_ = Dtype::uint8;
  size_t count_ = 0;
  std::span<const int64_t> shape_;
  int gpu_ = kHost;
};

}  // namespace pycomm::bindings
