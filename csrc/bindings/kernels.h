// Binds DeviceKernels as functions of addresses, counts and names. _core binds the CPU kernels and
// _cuda the CUDA kernels with this function, so pycomm/kernels calls both alike. pycomm/kernels
// also validates arrays and numbers.
//
// Tables are addresses of rows of 64-bit words, laid out as the structs of device_kernels.h; 0 is a
// null pointer. Every function takes (device, stream), the queue, last.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "bindings/names.h"
#include "codec/compact.h"
#include "codec/packet.h"
#include "core/dtype.h"
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

// A table in Python: (address, rows).
using Rows = std::pair<uintptr_t, size_t>;

template <typename Row>
std::span<const Row> table(Rows rows) {
  return {at<const Row>(rows.first), rows.second};
}

inline kernels::Queue queue(int device, uintptr_t stream) { return {device, at(stream)}; }

inline kernels::DgcTables dgc_tables(Rows pieces, Rows selections, std::string_view dtype) {
  return {table<kernels::DgcPiece>(pieces), table<kernels::DgcSelection>(selections),
          dtype_named(dtype)};
}

inline void bind_dgc(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "dgc_workspace_bytes",
      [&kernels](Rows pieces, Rows selections, std::string_view dtype) {
        return kernels.dgc_workspace_bytes(dgc_tables(pieces, selections, dtype));
      },
      Free());
  module.def(
      "dgc_step",
      [&kernels](Rows pieces, Rows selections, std::string_view dtype, std::string_view grad_dtype,
                 std::string_view weight_dtype, double momentum, double weight_decay, double scale,
                 uintptr_t scales, bool nesterov, bool masking, uintptr_t found_inf, Rows workspace,
                 int device, uintptr_t stream) {
        kernels.dgc_step({.tables = dgc_tables(pieces, selections, dtype),
                          .grad_dtype = dtype_named(grad_dtype),
                          .weight_dtype = dtype_named(weight_dtype),
                          .momentum = momentum,
                          .weight_decay = weight_decay,
                          .scale = scale,
                          .scales = at(scales),
                          .nesterov = nesterov,
                          .masking = masking,
                          .found_inf = at<const float>(found_inf),
                          .workspace = {at(workspace.first), workspace.second}},
                         queue(device, stream));
      },
      Free());
  module.def(
      "dgc_rollback",
      [&kernels](Rows pieces, Rows selections, std::string_view dtype, uintptr_t found_inf,
                 int device, uintptr_t stream) {
        kernels.dgc_rollback(dgc_tables(pieces, selections, dtype), at<const float>(found_inf),
                             queue(device, stream));
      },
      Free());
  module.def(
      "momentum_mask",
      [&kernels](uintptr_t u, uintptr_t v, size_t count, std::string_view dtype, Rows indices,
                 int device, uintptr_t stream) {
        kernels.momentum_mask(at(u), at(v), {table<int32_t>(indices), count, dtype_named(dtype)},
                              queue(device, stream));
      },
      Free());
}

inline void bind_selection(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "topk_workspace_bytes",
      [&kernels](size_t count, size_t k, std::string_view dtype) {
        return kernels.topk_workspace_bytes(count, k, dtype_named(dtype));
      },
      Free());
  module.def(
      "topk",
      [&kernels](Rows x, std::string_view dtype, size_t k, uintptr_t indices, uintptr_t values,
                 uintptr_t threshold, Rows workspace, int device, uintptr_t stream) {
        kernels.topk({at(x.first), x.second, dtype_named(dtype)},
                     {.k = k,
                      .indices = at<int32_t>(indices),
                      .values = at(values),
                      .threshold = at(threshold),
                      .workspace = {at(workspace.first), workspace.second}},
                     queue(device, stream));
      },
      Free());
}

inline void bind_packets(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "scatter_add",
      [&kernels](Rows out, std::string_view dtype, uintptr_t indices, uintptr_t values, size_t k,
                 std::string_view value_dtype, double scale, int device, uintptr_t stream) {
        kernels.scatter_add({at(out.first), out.second, dtype_named(dtype)},
                            {at<const int32_t>(indices), at(values), k}, dtype_named(value_dtype),
                            scale, queue(device, stream));
      },
      Free());
  module.def(
      "decode_sum",
      [&kernels](Rows out, std::string_view dtype, Rows packets, std::string_view value_dtype,
                 double scale, int device, uintptr_t stream) {
        kernels.decode_sum({table<kernels::Array>(out), dtype_named(dtype)},
                           table<codec::Packet>(packets), dtype_named(value_dtype), scale,
                           queue(device, stream));
      },
      Free());
  module.def(
      "decode_update",
      [&kernels](Rows param, std::string_view dtype, Rows packets, std::string_view value_dtype,
                 double lr, double scale, int device, uintptr_t stream) {
        kernels.decode_update({table<kernels::Array>(param), dtype_named(dtype)},
                              table<codec::Packet>(packets), dtype_named(value_dtype),
                              {.lr = lr, .scale = scale}, queue(device, stream));
      },
      Free());
  module.def(
      "encode",
      [&kernels](uintptr_t indices, uintptr_t values, size_t k, size_t count,
                 std::string_view dtype, std::string_view value_dtype, uintptr_t residual,
                 uintptr_t out, int device, uintptr_t stream) {
        kernels.encode({at<const int32_t>(indices), at(values), k},
                       {.count = count,
                        .dtype = dtype_named(dtype),
                        .value_dtype = dtype_named(value_dtype),
                        .residual = at(residual),
                        .out = at<std::byte>(out)},
                       queue(device, stream));
      },
      Free());
}

inline codec::CompactEncoding compact_encoding(size_t count, std::string_view index_code,
                                               std::string_view value_code) {
  const bool automatic = index_code == "auto";
  return {.count = count,
          .dtype = Dtype::float32,
          .automatic = automatic,
          .index_code = automatic
                            ? codec::IndexCode::list
                            : find<codec::IndexCode>(codec::kIndexCodes, index_code, "index code"),
          .value_code = find<codec::ValueCode>(codec::kValueCodes, value_code, "value code"),
          .residual = nullptr};
}

inline void bind_compact(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "encode_compact",
      [&kernels](uintptr_t indices, uintptr_t values, size_t k, size_t count,
                 std::string_view dtype, std::string_view index_code, std::string_view value_code,
                 uintptr_t residual, uintptr_t out, uintptr_t bytes, Rows workspace, int device,
                 uintptr_t stream) {
        codec::CompactEncoding encoding = compact_encoding(count, index_code, value_code);
        encoding.dtype = dtype_named(dtype);
        encoding.residual = at(residual);
        kernels.encode_compact({at<const int32_t>(indices), at(values), k}, encoding,
                               {.out = at<std::byte>(out),
                                .bytes = at<uint64_t>(bytes),
                                .workspace = {at(workspace.first), workspace.second}},
                               queue(device, stream));
      },
      Free());
  module.def(
      "decode_compact",
      [&kernels](Rows packets, size_t count, uintptr_t indices, uintptr_t values, uintptr_t refused,
                 Rows workspace, int device, uintptr_t stream) {
        kernels.decode_compact(table<kernels::DeviceKernels::CompactPacket>(packets), count,
                               {.indices = at<int32_t>(indices),
                                .values = at<float>(values),
                                .refused = at<uint32_t>(refused),
                                .workspace = {at(workspace.first), workspace.second}},
                               queue(device, stream));
      },
      Free());
  module.def(
      "codec_workspace_bytes",
      [&kernels](size_t k, size_t bytes) { return kernels.compact_workspace_bytes(k, bytes); },
      Free());
}

inline void bind_quantization(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "quantize",
      [&kernels](Rows x, std::string_view dtype, Rows blocks, unsigned bits, uintptr_t residual,
                 uintptr_t lost, uintptr_t out, int device, uintptr_t stream) {
        kernels.quantize({at(x.first), x.second, dtype_named(dtype)},
                         {table<kernels::Block>(blocks), bits},
                         {.residual = at<const float>(residual), .lost = at<float>(lost)},
                         at<std::byte>(out), queue(device, stream));
      },
      Free());
  module.def(
      "dequantize",
      [&kernels](uintptr_t packet, Rows blocks, unsigned bits, float scale, bool accumulate,
                 uintptr_t not_finite, Rows out, std::string_view dtype, int device,
                 uintptr_t stream) {
        kernels.dequantize(
            at<const std::byte>(packet), {table<kernels::Block>(blocks), bits},
            {.scale = scale, .accumulate = accumulate, .not_finite = at<uint32_t>(not_finite)},
            {at(out.first), out.second, dtype_named(dtype)}, queue(device, stream));
      },
      Free());
}

inline void bind_groups(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "update_step",
      [&kernels](Rows pieces, std::string_view dtype, size_t group, size_t k,
                 std::string_view value_code, uintptr_t indices, uintptr_t values, uintptr_t packet,
                 uintptr_t sizes, Rows workspace, int device, uintptr_t stream) {
        kernels.update_step(
            {.pieces = table<kernels::UpdatePiece>(pieces),
             .dtype = dtype_named(dtype),
             .group = group,
             .k = k,
             .value_code = find<codec::ValueCode>(codec::kValueCodes, value_code, "value code"),
             .indices = at<int32_t>(indices),
             .values = at<float>(values),
             .packet = at<std::byte>(packet),
             .sizes = at<uint64_t>(sizes),
             .workspace = {at(workspace.first), workspace.second}},
            queue(device, stream));
      },
      Free());
  module.def(
      "topk_groups",
      [&kernels](Rows tensors, size_t group, size_t k, uintptr_t indices, uintptr_t sizes,
                 Rows workspace, int device, uintptr_t stream) {
        kernels.topk_groups({.tensors = table<kernels::Array>(tensors),
                             .group = group,
                             .k = k,
                             .indices = at<int32_t>(indices),
                             .sizes = at<float>(sizes),
                             .workspace = {at(workspace.first), workspace.second}},
                            queue(device, stream));
      },
      Free());
  module.def(
      "write_groups",
      [&kernels](Rows tensors, size_t group, Rows indices, Rows values, Rows workspace, int device,
                 uintptr_t stream) {
        kernels.write_groups({.tensors = table<kernels::Array>(tensors),
                              .group = group,
                              .indices = table<int32_t>(indices),
                              .values = table<float>(values),
                              .workspace = {at(workspace.first), workspace.second}},
                             queue(device, stream));
      },
      Free());
  module.def("group_workspace_bytes", [&kernels](size_t tensors, size_t groups, size_t k) {
    return kernels.group_workspace_bytes({tensors, groups, k});
  });
  const auto decoding = [](Rows counts, size_t group, Rows packets) {
    return kernels::GroupDecoding{.counts = table<uint64_t>(counts),
                                  .group = group,
                                  .packets = table<kernels::GroupPacket>(packets)};
  };
  module.def(
      "decode_groups",
      [&kernels, decoding](Rows counts, size_t group, Rows packets, uintptr_t elements,
                           uintptr_t values, uintptr_t refused, Rows workspace, int device,
                           uintptr_t stream) {
        kernels::GroupDecoding all = decoding(counts, group, packets);
        all.elements = at<int32_t>(elements);
        all.values = at<float>(values);
        all.refused = at<uint32_t>(refused);
        all.workspace = {at(workspace.first), workspace.second};
        kernels.decode_groups(all, queue(device, stream));
      },
      Free());
  module.def("group_decoding_bytes", [&kernels, decoding](Rows counts, size_t group, Rows packets) {
    return kernels.group_decoding_bytes(decoding(counts, group, packets));
  });
}

inline void bind_dense(py::module_& module, kernels::DeviceKernels& kernels) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "norm_workspace_bytes",
      [&kernels](Rows arrays) {
        return kernels.norm_workspace_bytes(table<kernels::Array>(arrays));
      },
      Free());
  module.def(
      "norm",
      [&kernels](Rows arrays, std::string_view dtype, uintptr_t norms, Rows workspace, int device,
                 uintptr_t stream) {
        kernels.norm(table<kernels::Array>(arrays), dtype_named(dtype), at<double>(norms),
                     {at(workspace.first), workspace.second}, queue(device, stream));
      },
      Free());
  module.def(
      "clip_scale",
      [&kernels](uintptr_t norms, Rows factors, std::string_view dtype, double limit, double scale,
                 int device, uintptr_t stream) {
        kernels.clip_scale(at<const double>(norms),
                           {at(factors.first), factors.second, dtype_named(dtype)},
                           {.limit = limit, .scale = scale}, queue(device, stream));
      },
      Free());
  module.def(
      "multiply",
      [&kernels](Rows x, std::string_view dtype, uintptr_t factor, int device, uintptr_t stream) {
        kernels.multiply({at(x.first), x.second, dtype_named(dtype)}, at(factor),
                         queue(device, stream));
      },
      Free());
  module.def(
      "cast",
      [&kernels](Rows x, std::string_view dtype, uintptr_t out, std::string_view out_dtype,
                 int device, uintptr_t stream) {
        kernels.cast({at(x.first), x.second, dtype_named(dtype)},
                     {at(out), x.second, dtype_named(out_dtype)}, queue(device, stream));
      },
      Free());
  module.def(
      "reduce",
      [&kernels](Rows out, std::string_view dtype, Rows xs, std::string_view op, int device,
                 uintptr_t stream) {
        kernels.reduce({at(out.first), out.second, dtype_named(dtype)}, table<const void*>(xs),
                       find<ReduceOp>(kReduceOps, op, "op"), queue(device, stream));
      },
      Free());
}

// `kernels` must outlive the module.
inline void bind_kernels(py::module_& module, kernels::DeviceKernels& kernels) {
  bind_dgc(module, kernels);
  bind_selection(module, kernels);
  bind_packets(module, kernels);
  bind_compact(module, kernels);
  bind_quantization(module, kernels);
  bind_groups(module, kernels);
  bind_dense(module, kernels);
}

}  // namespace pycomm::bindings
