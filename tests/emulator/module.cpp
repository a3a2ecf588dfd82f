// _emulated: the interface of _cuda over the emulator, for tests in Python: the functions of
// `kernels` on host memory, devices, and the fake NCCL. `runtime` has the rest of CUDA: memory,
// streams, graphs.
//
// For kernels alone, each of which is complete when it returns, it is eager; for groups it is not,
// so that missing ordering shows.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/cuda_device.h"
#include "bindings/cuda_nccl.h"
#include "bindings/kernels.h"
#include "core/errors.h"
#include "cuda/cuda_kernels.h"
#include "cuda/host.hpp"
#include "fake_nccl.hpp"
#include "fiber.hpp"
#include "grid.hpp"
#include "runtime.hpp"
#include "stream_types.hpp"

namespace {

void set_order(const std::string& order, uint64_t seed, unsigned resident_blocks) {
  auto& options = emulator::options();
  options.order = order == "reverse"  ? emulator::Order::reverse
                  : order == "random" ? emulator::Order::random
                                      : emulator::Order::forward;
  options.seed = seed;
  options.resident_blocks = resident_blocks;
}

// (bytes loaded, bytes stored, launches) since the last call.
std::tuple<uint64_t, uint64_t, uint64_t> take_traffic() {
  const emulator::Traffic all = emulator::traffic();
  emulator::traffic() = {};
  return {all.loaded, all.stored, all.launches};
}

using pycomm::bindings::at;
namespace py = pybind11;

void expect(cudaError_t error) {
  if (error != cudaSuccess) throw pycomm::InternalError(cudaGetErrorString(error));
}

cudaStream_t stream_at(uintptr_t stream) { return at<CUstream_st>(stream); }

uintptr_t make_stream(int device) {
  const pycomm::cuda::OnDevice on({.device = device});
  cudaStream_t made = nullptr;
  expect(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return reinterpret_cast<uintptr_t>(made);
}

uintptr_t allocate(size_t bytes) {
  void* made = nullptr;
  expect(cudaMalloc(&made, bytes));
  return reinterpret_cast<uintptr_t>(made);
}

std::vector<int> contexts() {
  std::vector<int> devices;
  int count = 0;
  expect(cudaGetDeviceCount(&count));
  for (int device = 0; device < count; ++device)
    if (emulator::has_context(device)) devices.push_back(device);
  return devices;
}

// What a library with a context of its own does: makes it current.
void push_own_context(int device) { emulator::push_context(new CUctx_st{device}); }

// `host` must stay alive until the copy is made.
void put(uintptr_t to, const py::bytes& host, uintptr_t stream) {
  auto text = std::make_shared<std::string>(host);
  expect(emulator::enqueue(stream_at(stream), [to, text] {
    emulator::device_writes(at(to), text->size());
    std::memcpy(at(to), text->data(), text->size());
  }));
}

// Waits until the stream has completed all earlier operations.
py::bytes get(uintptr_t from, size_t bytes, uintptr_t stream) {
  std::string text(bytes, '\0');
  {
    const py::gil_scoped_release release;
    expect(
        cudaMemcpyAsync(text.data(), at(from), bytes, cudaMemcpyDeviceToHost, stream_at(stream)));
    expect(cudaStreamSynchronize(stream_at(stream)));
  }
  return text;
}

uintptr_t end_capture(uintptr_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  expect(cudaStreamEndCapture(stream_at(stream), &graph));
  expect(cudaGraphInstantiate(&made, graph, 0));
  return reinterpret_cast<uintptr_t>(made);
}

// A gate at which a stream waits until it is opened.
class Gate {
 public:
  explicit Gate(uintptr_t stream) {
    expect(emulator::enqueue_polled(stream_at(stream), [open = open_] { return open->load(); }));
  }
  void open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

void bind_runtime(py::module_&& module) {
  py::class_<Gate>(module, "Gate").def(py::init<uintptr_t>()).def("open", &Gate::open);
  module.def("set_eager", [](bool eager) { emulator::options().eager = eager; });
  module.def("make_stream", &make_stream);
  module.def("contexts", &contexts);
  module.def("set_device", [](int device) { expect(cudaSetDevice(device)); });
  module.def("push_own_context", &push_own_context);
  module.def("set_most_memory", [](size_t bytes) { emulator::options().most_memory = bytes; });
  module.def("pop_context", &emulator::pop_context);
  module.def("current", [] {
    return std::pair(emulator::current_device,
                     reinterpret_cast<uintptr_t>(emulator::current_context));
  });
  module.def("allocate", &allocate);
  module.def("copy", [](uintptr_t to, uintptr_t from, size_t bytes, uintptr_t stream) {
    expect(cudaMemcpyAsync(at(to), at(from), bytes, cudaMemcpyDeviceToDevice, stream_at(stream)));
  });
  module.def("put", &put);
  module.def("get", &get);
  module.def("idle",
             [](uintptr_t stream) { return cudaStreamQuery(stream_at(stream)) == cudaSuccess; });
  module.def("begin_capture", [](uintptr_t stream) {
    expect(cudaStreamBeginCapture(stream_at(stream), cudaStreamCaptureModeGlobal));
  });
  module.def("events_made", &emulator::events_made);
  module.def("queries", &emulator::queries);
  module.def("waits", &emulator::waits);
  module.def("lazy_launches", &emulator::lazy_launches);
  module.def("calls_of_thread", &emulator::calls_of_thread);
  module.def("query_address", [] { return reinterpret_cast<uintptr_t>(&cudaEventQuery); });
  module.def("end_capture", &end_capture);
  module.def("launch", [](uintptr_t graph, uintptr_t stream) {
    expect(cudaGraphLaunch(at<CUgraphExec_st>(graph), stream_at(stream)));
  });
}

// The library that this thread loaded last: ranks may be threads.
thread_local std::weak_ptr<fake_nccl::FakeNccl> loaded;

std::shared_ptr<pycomm::nccl::NcclApi> load_fake(std::span<const pycomm::nccl::NcclPlace>) {
  auto made = std::make_shared<fake_nccl::FakeNccl>();
  loaded = made;
  return made;
}

py::dict take_nccl_counts() {
  const auto library = loaded.lock();
  const fake_nccl::Counts counts = library ? library->take_counts() : fake_nccl::Counts{};
  py::dict all;
  all["groups"] = counts.groups;
  all["sends"] = counts.sends;
  all["receives"] = counts.receives;
  all["bytes_sent"] = counts.bytes_sent;
  all["collectives"] = counts.collectives;
  return all;
}

}  // namespace

PYBIND11_MODULE(_emulated, module) {
  static pycomm::cuda::CudaKernels cuda;
  emulator::options().eager = true;
  pycomm::bindings::py::module_ kernels = module.def_submodule("kernels");
  pycomm::bindings::bind_kernels(kernels, cuda);
  pycomm::bindings::bind_device(module);
  py::module_ nccl = module.def_submodule("nccl");
  pycomm::bindings::bind_nccl(nccl, &load_fake);
  nccl.def("take_counts", &take_nccl_counts);
  nccl.def("delay_calls",
           [](long most_us) { fake_nccl::delay_calls(std::chrono::microseconds(most_us)); });
  bind_runtime(module.def_submodule("runtime"));
  module.def("set_order", &set_order);
  module.def("set_no_image", [](bool none) { emulator::options().no_image = none; });
  module.def("why_not", &pycomm::cuda::why_not);
  module.def("take_traffic", &take_traffic);
  module.def("forget_failure", &emulator::forget_failure);
}
