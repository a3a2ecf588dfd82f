// _core.kernels: the processor's kernels, as functions of addresses, and the heads of packets.
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "bindings/core.h"
#include "bindings/kernels.h"
#include "kernels/lean.h"
#include "kernels/stream.h"

namespace pycomm::bindings {
namespace {

// (k, count, value dtype or code, codec) of what may be a packet, raw or lean.
std::tuple<size_t, size_t, std::string_view, std::string_view> packet_header(uintptr_t packet,
                                                                             size_t bytes) {
  const std::span found(at<const std::byte>(packet), bytes);
  if (is_lean(found)) {
    const LeanHeader header = read_lean_header(found);
    return {header.k, header.count, kValueCodes[static_cast<size_t>(header.value_code)],
            kIndexCodes[static_cast<size_t>(header.index_code)]};
  }
  const PacketHeader header = read_packet_header(found);
  return {header.k, header.count, name_of(header.value_dtype), "raw"};
}

// The loops of stream.h, for benchmarks.
void bind_streams(py::module_& module) {
  using Free = py::call_guard<py::gil_scoped_release>;
  module.def(
      "stream_step",
      [](uintptr_t grad, uintptr_t u, uintptr_t v, size_t count) {
        stream_step(at<const float>(grad), at<float>(u), at<float>(v), count);
      },
      Free());
  module.def(
      "stream_copy",
      [](uintptr_t from, uintptr_t to, size_t count, bool around) {
        stream_copy(at<const float>(from), at<float>(to), count, around);
      },
      Free());
  module.def(
      "stream_read",
      [](uintptr_t x, size_t count) { return stream_read(at<const float>(x), count); }, Free());
}

}  // namespace

void bind_cpu_kernels(py::module_& module) {
  py::module_ kernels = module.def_submodule("kernels", "The processor's kernels.");
  bind_kernels(kernels, cpu_kernels());
  module.def("read_packet_header", &packet_header);
  module.def("set_kernel_threads", &set_kernel_threads);
  module.def("kernel_threads", &kernel_threads);
  module.def("set_kernel_isa", &set_kernel_isa);
  module.def("kernel_isa", &kernel_isa);
  module.def("most_lean_bytes",
             [](size_t k, size_t count, std::string_view index_code, std::string_view value_code) {
               return most_lean_bytes(k, lean_encoding(count, index_code, value_code));
             });
  module.def("read_lean_head", [](uintptr_t head, size_t bytes, size_t size) {
    const LeanHeader header = read_lean_header({at<const std::byte>(head), bytes}, size);
    return std::pair(header.k, header.count);
  });
  bind_streams(module);
}

}  // namespace pycomm::bindings
