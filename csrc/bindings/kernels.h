// Binds functions of structs, spans and addresses, such as DeviceKernels, as Python functions of
// numbers and names. _core binds the CPU kernels and _cuda the CUDA kernels, so pycomm/kernels
// calls both alike. pycomm/kernels also validates arrays and numbers.
//
// A Python function takes the fields of all parameters in order, structs within structs included.
// Tuples are flattened: (address, rows) is a span, whose rows of 64-bit words are laid out as the
// struct. 0 is a null pointer. The last parameter of a kernel is its queue, (device, stream).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/names.h"
#include "codec/compact.h"
#include "core/dtype.h"
#include "core/errors.h"
#include "core/reduce_op.h"
#include "kernels/device_kernels.h"

namespace pycomm::bindings {

namespace py = pybind11;

// Converts an address, a Python integer, to a pointer.
template <typename T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr): Python's view
}

inline Dtype dtype_named(std::string_view name) { return find<Dtype>(kDtypeNames, name, "dtype"); }

template <typename Enum>
Enum named(std::string_view name) {
  if constexpr (std::is_same_v<Enum, Dtype>)
    return dtype_named(name);
  else if constexpr (std::is_same_v<Enum, ReduceOp>)
    return find<ReduceOp>(kReduceOps, name, "op");
  else if constexpr (std::is_same_v<Enum, codec::IndexCode>)
    return find<codec::IndexCode>(codec::kIndexCodes, name, "index code");
  else
    return find<codec::ValueCode>(codec::kValueCodes, name, "value code");
}

// Converts to the type of any field.
struct AnyField {
  template <typename T>
  operator T() const;  // NOLINT(google-explicit-constructor): never defined
};

// The number of fields of a struct without constructors.
template <typename T, typename... Fields>
constexpr size_t fields_of() {
  if constexpr (requires { T{Fields{}..., AnyField{}}; })
    return fields_of<T, Fields..., AnyField>();
  else
    return sizeof...(Fields);
}

template <typename T>
inline constexpr bool kIsSpan = false;
template <typename Row>
inline constexpr bool kIsSpan<std::span<Row>> = true;

// The arguments of a call, flattened, which are taken in order.
class Arguments {
 public:
  explicit Arguments(const py::args& given) { add(given); }

  template <typename T>
  T take() {
    if constexpr (std::is_pointer_v<T>) {
      return at<std::remove_pointer_t<T>>(take<uintptr_t>());
    } else if constexpr (kIsSpan<T>) {
      auto* const first = take<typename T::pointer>();
      return T(first, take<size_t>());
    } else if constexpr (std::is_enum_v<T>) {
      return named<T>(next().cast<std::string_view>());
    } else if constexpr (std::is_arithmetic_v<T>) {
      return next().cast<T>();
    } else {
      return take_fields<T>(std::make_index_sequence<fields_of<T>()>());
    }
  }
  void check_all_taken() const { check(taken_ == all_.size(), "a kernel got too many arguments"); }

 private:
  struct Field {
    Arguments& from;
    template <typename T>
    operator T() const {  // NOLINT(google-explicit-constructor): to the field's type
      return from.take<T>();
    }
  };
  // Braces evaluate in order.
  template <typename T, size_t... kFields>
  T take_fields(std::index_sequence<kFields...> /*fields*/) {
    return T{((void)kFields, Field{*this})...};
  }
  void add(const py::tuple& given) {
    for (const py::handle one : given)
      py::isinstance<py::tuple>(one) ? add(py::reinterpret_borrow<py::tuple>(one))
                                     : all_.push_back(one);
  }
  py::handle next() {
    check(taken_ < all_.size(), "a kernel got too few arguments");
    return all_[taken_++];
  }

  std::vector<py::handle> all_;  // owned by the caller's tuple
  size_t taken_ = 0;
};

// Calls `function` with all its parameters, without Python's lock.
template <typename Result, typename... Parameters>
Result call_with(const py::args& given, const auto& function) {
  Arguments arguments(given);
  std::tuple<std::remove_cvref_t<Parameters>...> taken{
      arguments.take<std::remove_cvref_t<Parameters>>()...};
  arguments.check_all_taken();
  const py::gil_scoped_release released;
  return std::apply(function, taken);
}

template <typename Result, typename... Parameters>
void bind_function(py::module_& module, const char* name, Result (*function)(Parameters...)) {
  module.def(name, [function](const py::args& given) {
    return call_with<Result, Parameters...>(given, function);
  });
}

// `kernels` must outlive the module.
template <typename Kernels, typename Result, typename... Parameters>
void bind_kernel(py::module_& module, kernels::DeviceKernels& kernels, const char* name,
                 Result (Kernels::*kernel)(Parameters...)) {
  module.def(name, [&kernels, kernel](const py::args& given) {
    return call_with<Result, Parameters...>(
        given, [&](const auto&... taken) { return (kernels.*kernel)(taken...); });
  });
}

inline void bind_kernels(py::module_& module, kernels::DeviceKernels& kernels) {
  using All = kernels::DeviceKernels;
  const auto bind = [&](const char* name, auto kernel) {
    bind_kernel(module, kernels, name, kernel);
  };
  bind("dgc_step", &All::dgc_step);
  bind("dgc_workspace_bytes", &All::dgc_workspace_bytes);
  bind("dgc_rollback", &All::dgc_rollback);
  bind("momentum_mask", &All::momentum_mask);
  bind("topk", &All::topk);
  bind("topk_workspace_bytes", &All::topk_workspace_bytes);
  bind("scatter_add", &All::scatter_add);
  bind("decode_sum", &All::decode_sum);
  bind("decode_update", &All::decode_update);
  bind("encode", &All::encode);
  bind("encode_compact", &All::encode_compact);
  bind("decode_compact", &All::decode_compact);
  bind("compact_encoding_bytes", &All::compact_encoding_bytes);
  bind("compact_decoding_bytes", &All::compact_decoding_bytes);
  bind("quantize", &All::quantize);
  bind("dequantize", &All::dequantize);
  bind("update_step", &All::update_step);
  bind("topk_groups", &All::topk_groups);
  bind("write_groups", &All::write_groups);
  bind("group_workspace_bytes", &All::group_workspace_bytes);
  bind("norm", &All::norm);
  bind("norm_workspace_bytes", &All::norm_workspace_bytes);
  bind("clip_scale", &All::clip_scale);
  bind("multiply", &All::multiply);
  bind("cast", &All::cast);
  bind("reduce", &All::reduce);
}

}  // namespace pycomm::bindings
