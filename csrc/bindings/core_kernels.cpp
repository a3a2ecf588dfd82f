// _core.kernels: the CPU kernels, as functions of addresses, and packet headers.
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/core.h"
#include "bindings/kernels.h"
#include "codec/compact.h"
#include "codec/groups.h"
#include "cpu/isa.h"
#include "kernels/group_batch.h"
#include "kernels/quantize.h"

namespace pycomm::bindings {
namespace {

// Reads (k, count, value dtype or code, codec) of a possible packet, raw or compact.
std::tuple<size_t, size_t, std::string_view, std::string_view> packet_header(uintptr_t packet,
                                                                             size_t bytes) {
  const std::span found(at<const std::byte>(packet), bytes);
  if (codec::is_compact(found)) {
    const codec::CompactHeader header = codec::read_compact_header(found);
    return {header.k, header.count, codec::kValueCodes[static_cast<size_t>(header.value_code)],
            codec::kIndexCodes[static_cast<size_t>(header.index_code)]};
  }
  const codec::PacketHeader header = codec::read_packet_header(found);
  return {header.k, header.count, name_of(header.value_dtype), "raw"};
}

codec::CompactEncoding compact_encoding(size_t count, std::string_view index_code,
                                        std::string_view value_code) {
  const bool automatic = index_code == "auto";
  return {.count = count,
          .dtype = Dtype::float32,
          .automatic = automatic,
          .index_code = automatic ? codec::IndexCode::list : named<codec::IndexCode>(index_code),
          .value_code = named<codec::ValueCode>(value_code),
          .residual = nullptr};
}

// Encodes adjacent compact packets, each with one of the `lengths` and of an array of `count`
// elements. A length of 0 produces no bytes.
void bind_batches(py::module_& module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  using Sizes = std::vector<size_t>;
  module.def(
      "most_batch_bytes",
      [](const Sizes& lengths, size_t count, std::string_view index_code,
         std::string_view value_code) {
        const codec::CompactEncoding encoding = compact_encoding(count, index_code, value_code);
        size_t bytes = 0;
        for (const size_t k : lengths) bytes += k == 0 ? 0 : codec::most_compact_bytes(k, encoding);
        return bytes;
      },
      Free());
  module.def(
      "encode_batch",
      [](uintptr_t indices, uintptr_t values, const Sizes& lengths, size_t count,
         std::string_view dtype, std::string_view index_code, std::string_view value_code,
         uintptr_t out) {
        codec::CompactEncoding encoding = compact_encoding(count, index_code, value_code);
        encoding.dtype = dtype_named(dtype);
        const auto* where = at<const int32_t>(indices);
        const auto* what = at<const std::byte>(values);
        auto* packet = at<std::byte>(out);
        Sizes sizes;
        for (const size_t k : lengths) {
          sizes.push_back(k == 0 ? 0 : codec::encode_compact({where, what, k}, encoding, packet));
          where += k;
          what += k * bytes_of(encoding.dtype);
          packet += sizes.back();
        }
        return sizes;
      },
      Free());
  module.def(
      "batch_lengths",
      [](uintptr_t packets, const Sizes& sizes, size_t count) {
        const auto* packet = at<const std::byte>(packets);
        Sizes lengths;
        for (const size_t bytes : sizes) {
          lengths.push_back(0);
          if (bytes == 0) continue;
          const codec::CompactHeader header = codec::read_compact_header({packet, bytes});
          if (header.count != count)
            throw InvalidArgument("invalid packet: it is of an array of " +
                                  std::to_string(header.count) + " elements, expected " +
                                  std::to_string(count));
          lengths.back() = header.k;
          packet += bytes;
        }
        return lengths;
      },
      Free());
  module.def(
      "decode_batch",
      [](uintptr_t packets, const Sizes& sizes, const Sizes& lengths, uintptr_t indices,
         uintptr_t values) {
        const auto* packet = at<const std::byte>(packets);
        auto* where = at<int32_t>(indices);
        auto* what = at<float>(values);
        for (size_t i = 0; i < sizes.size(); ++i) {
          if (sizes[i] > 0) codec::decode_compact({packet, sizes[i]}, where, what);
          packet += sizes[i];
          where += lengths[i];
          what += lengths[i];
        }
      },
      Free());
}

// Packets of the update step.
void bind_group_packets(py::module_& module) {
  using Sizes = std::vector<size_t>;
  module.attr("MOST_GROUP_HEAD") = codec::kMostGroupHead;
  bind_function(module, "most_group_bytes", &codec::most_group_bytes);
  // (k, groups, values) of packets of these sizes. The first bytes of each, at most
  // MOST_GROUP_HEAD, are at an offset in `heads`.
  module.def("read_group_headers", [](uintptr_t heads, const Sizes& offsets, const Sizes& sizes) {
    std::vector<std::tuple<size_t, size_t, size_t>> found;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const std::span head(at<const std::byte>(heads) + offsets.at(i),
                           std::min(sizes[i], codec::kMostGroupHead));
      const codec::GroupHeader header = codec::read_group_header(head, sizes[i]);
      found.emplace_back(header.k, header.count, header.values);
    }
    return found;
  });
  bind_function(module, "read_group_indices", &kernels::read_group_indices);
  bind_function(module, "decode_group_sum", &kernels::decode_group_sum);
  bind_function(module, "decode_group_update", &kernels::decode_group_update);
}

}  // namespace

void bind_cpu_kernels(py::module_& module) {
  py::module_ kernels = module.def_submodule("kernels", "The processor's kernels.");
  bind_kernels(kernels, kernels::cpu_kernels());
  module.def("read_packet_header", &packet_header);
  module.def("set_kernel_threads", &kernels::set_kernel_threads);
  module.def("kernel_threads", &kernels::kernel_threads);
  module.def("set_kernel_isa", &cpu::set_kernel_isa);
  module.def("kernel_isa", &cpu::kernel_isa);
  module.def("most_compact_bytes",
             [](size_t k, size_t count, std::string_view index_code, std::string_view value_code) {
               return codec::most_compact_bytes(k, compact_encoding(count, index_code, value_code));
             });
  module.def("read_compact_header", [](uintptr_t head, size_t bytes, size_t size) {
    const codec::CompactHeader header =
        codec::read_compact_header({at<const std::byte>(head), bytes}, size);
    return std::pair(header.k, header.count);
  });
  bind_batches(module);
  bind_group_packets(module);
  bind_function(module, "quantized_bytes", &kernels::quantized_bytes);
}

}  // namespace pycomm::bindings
