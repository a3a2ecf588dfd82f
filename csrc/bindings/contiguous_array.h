// The memory of an array, as the modules of _core and c10d pass it to each other: only c10d
// includes torch and can read its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace pycomm::bindings {

// Elements that the owner of the array keeps alive.
struct ContiguousArray {
  static constexpr int kHost = -1;

  std::byte* data = nullptr;
  Dtype dtype = Dtype::uint8;
  size_t count = 0;
  std::span<const int64_t> shape{};  // the array's own
  int gpu = kHost;                   // its number, or kHost
};

// False if `x` is not a contiguous tensor. Requires the GIL; sets no Python error.
using TensorReader = bool (*)(PyObject* x, ContiguousArray& array) noexcept;
inline constexpr const char* kTensorReader = "pycomm.TensorReader";  // of its capsule

}  // namespace pycomm::bindings
