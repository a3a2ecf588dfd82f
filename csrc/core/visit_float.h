// A float dtype as a constant of the compiler, for functions that are templates over dtypes.
#pragma once

#include <string>
#include <type_traits>

#include "core/dtype.h"
#include "core/errors.h"

namespace pycomm {

// Calls f(std::integral_constant<Dtype, dtype>()); it must be a float dtype.
template <typename F>
decltype(auto) visit_float(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::float16:
      return f(std::integral_constant<Dtype, Dtype::float16>());
    case Dtype::bfloat16:
      return f(std::integral_constant<Dtype, Dtype::bfloat16>());
    case Dtype::float32:
      return f(std::integral_constant<Dtype, Dtype::float32>());
    case Dtype::float64:
      return f(std::integral_constant<Dtype, Dtype::float64>());
    case Dtype::int8:
    case Dtype::int16:
    case Dtype::int32:
    case Dtype::int64:
    case Dtype::uint8:
    case Dtype::boolean:
      break;
  }
  throw InvalidArgument("invalid dtype " + std::string(name_of(dtype)) +
                        ": expected a float dtype");
}

// The same for the dtypes of u and v: float32 and float64.
template <typename F>
decltype(auto) visit_real(Dtype dtype, F&& f) {
  if (dtype == Dtype::float64) return f(std::integral_constant<Dtype, Dtype::float64>());
  check(dtype == Dtype::float32, "u and v must be float32 or float64");
  return f(std::integral_constant<Dtype, Dtype::float32>());
}

}  // namespace pycomm
