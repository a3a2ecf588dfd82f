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

codec::CompactCodes compact_codes(std::string_view index_code, std::string_view value_code) {
  const bool automatic = index_code == "auto";
  return {.dtype = Dtype::float32,
          .automatic = automatic,
          .index_code = automatic ? codec::IndexCode::list : named<codec::IndexCode>(index_code),
          .value_code = named<codec::ValueCode>(value_code)};
}

using Sizes = std::vector<size_t>;

// Sizes of packets; packet p is of an array of counts[p % counts.size()] groups.
void bind_compact_packets(py::module_& module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "most_compact_bytes",
      [](const Sizes& lengths, const Sizes& counts, size_t group, std::string_view index_code,
         std::string_view value_code) {
        const codec::CompactCodes codes = compact_codes(index_code, value_code);
        Sizes most;
        for (const size_t k : lengths)
          most.push_back(
              codec::most_compact_bytes(k, counts.at(most.size() % counts.size()), group, codes));
        return most;
      },
      Free());
  module.def("read_compact_header", [](uintptr_t head, size_t bytes, size_t size) {
    const codec::CompactHeader header =
        codec::read_compact_header({at<const std::byte>(head), bytes}, size);
    return std::pair(header.k, header.count);
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
  bind_compact_packets(module);
  bind_function(module, "quantized_bytes", &kernels::quantized_bytes);
}

}  // namespace pycomm::bindings
