// Torch tensors on emulated GPUs: torch's device type for others ("privateuseone") over the same
// streams and memory as _emulated's. It tests torch's operations around a call of the backend
// without a GPU.
//
// An operation runs on the CPU: it waits for the thread's current stream, and its results are
// enqueued there. Freed memory is overwritten in the order of the stream that allocated it, and
// reused there, as in torch's GPU allocator: a use after free shows.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <driver_types.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "device/device.h"

namespace {

namespace py = pybind11;
using c10::DeviceIndex;
using pycomm::device::Device;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kStreams = 8;  // of a device; 0 is its default one, the others are pooled
constexpr size_t kDevices = 8;

c10::Device device_at(DeviceIndex index) { return {kType, index}; }

// cudaEventQuery() of _emulated.
using Query = int (*)(void*);
Query query = nullptr;

// Waits of the host for a stream, and copies between the device and host memory that is not pinned;
// without those of operations that run on the CPU only here.
std::atomic<uint64_t> waits = 0, copies = 0;
thread_local bool in_fallback = false;

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

// The state of a device. Never destroyed: a process may end with work in a stream.
struct Side {
  std::shared_ptr<Device> device;
  std::array<void*, kStreams> streams{};
  std::atomic<c10::StreamId> next{1};
};
std::vector<Side*>& sides() {
  static auto* all = new std::vector<Side*>;
  return *all;
}
Side& side_at(DeviceIndex index) { return *sides().at(static_cast<size_t>(index)); }
// The id of a stream that torch did not make is its address.
void* raw(const c10::Stream& s) {
  return s.id() < kStreams ? side_at(s.device_index()).streams.at(s.id())
                           : reinterpret_cast<void*>(s.id());
}

c10::Stream current(DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(index),
                     current_streams.at(static_cast<size_t>(index)));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device_at(std::exchange(current_device, to.index()));
  }
  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device to) const override { current_device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(sides().size());
  }

  c10::Stream getStream(c10::Device on) const override { return current(on.index()); }
  c10::Stream getDefaultStream(c10::Device on) const override {
    return c10::Stream(c10::Stream::DEFAULT, on);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override {
    const c10::StreamId next = side_at(on.index()).next++;
    return c10::Stream(c10::Stream::UNSAFE, on, 1 + next % (kStreams - 1));
  }
  c10::Stream getNewStream(c10::Device on, int) const override {
    return getStreamFromGlobalPool(on, false);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = current(to.device_index());
    current_streams.at(static_cast<size_t>(to.device_index())) = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return raw(s); }
  bool queryStream(const c10::Stream& s) const override {
    pycomm::device::Event event(side_at(s.device_index()).device);
    event.record(raw(s));
    return event.passed();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    if (!in_fallback) ++waits;
    pycomm::device::Event event(side_at(s.device_index()).device);
    event.record(raw(s));
    while (!event.passed()) continue;  // asking lets the streams work
  }

  void record(void** event, const c10::Stream& s, const DeviceIndex,
              const c10::EventFlag) const override {
    Device& device = *side_at(s.device_index()).device;
    if (*event == nullptr) *event = device.make_event();
    device.record(*event, raw(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) side_at(s.device_index()).device->wait(raw(s), event);
  }
  bool queryEvent(void* event) const override {  // in the thread's capture mode, as torch asks
    if (event == nullptr) return true;
    const int error = query(event);
    TORCH_CHECK(error == cudaSuccess || error == cudaErrorNotReady, "CUDA error ", error);
    return error == cudaSuccess;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event != nullptr) side_at(0).device->drop_event(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The queries of the autograd engine before it runs on streams.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

// Blocks, by the stream on which they were taken.
class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current(current_device);
    const Key key{current_device, stream.id(), std::max<size_t>(bytes, 1)};
    auto* block = new Block{key, nullptr};
    const std::lock_guard lock(mutex_);
    auto& free = free_[key];
    if (free.empty()) {
      block->at = side_at(current_device).device->allocate(std::get<size_t>(key));
    } else {
      block->at = free.back();
      free.pop_back();
    }
    return {block->at, block, &drop, device_at(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    side_at(current_device).device->copy(to, from, bytes, raw(current(current_device)));
  }

 private:
  using Key = std::tuple<DeviceIndex, c10::StreamId, size_t>;
  struct Block {
    Key key;
    void* at;
  };
  static void drop(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    const auto [index, stream, bytes] = block->key;
    Side& side = side_at(index);
    side.device->clear(block->at, bytes,
                       raw(c10::Stream(c10::Stream::UNSAFE, device_at(index), stream)));
    const std::lock_guard lock(mutex_);
    free_[block->key].push_back(block->at);
  }
  static inline std::mutex mutex_;
  static inline std::map<Key, std::vector<void*>> free_;
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// Data in transit from the CPU to a device.
class Uploads {
 public:
  void put(void* to, std::vector<std::byte> data, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    while (!under_way_.empty() && under_way_.front().over.passed()) under_way_.pop_front();
    const auto& device = side_at(stream.device_index()).device;
    auto& one = under_way_.emplace_back(std::move(data), device);
    device->copy(to, one.data.data(), one.data.size(), raw(stream));
    one.over.record(raw(stream));
  }

 private:
  struct One {
    One(std::vector<std::byte> bytes, const std::shared_ptr<Device>& device)
        : data(std::move(bytes)), over(device) {}
    std::vector<std::byte> data;
    pycomm::device::Event over;
  };
  std::mutex mutex_;
  std::deque<One> under_way_;
};
Uploads& uploads() {
  static auto* all = new Uploads;
  return *all;
}

// How many bytes the tensor's elements lie in.
size_t extent(const at::Tensor& x) {
  if (x.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  return static_cast<size_t>(last + 1) * x.element_size();
}

// Host memory and a tensor there, of the same strides.
using OnHost = std::pair<std::vector<std::byte>, at::Tensor>;

OnHost garbage_like(const at::Tensor& x) {
  std::vector<std::byte> data(extent(x));
  const at::Tensor view =
      at::from_blob(data.data(), x.sizes(), x.strides(), x.options().device(c10::DeviceType::CPU));
  return {std::move(data), view};
}

// With its elements, after all earlier operations of the current stream.
OnHost on_host(const at::Tensor& x) {
  Guard().synchronizeStream(current(x.device().index()));
  OnHost made = garbage_like(x);
  if (x.numel() > 0) std::memcpy(made.first.data(), x.data_ptr(), made.first.size());
  return made;
}

// A contiguous tensor is written without reading or waiting.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const c10::Stream stream = current((to.is_cpu() ? from : to).device().index());
  const bool whole = !to.is_cpu() && to.is_contiguous();
  if (whole && from.device() == to.device() && from.is_contiguous() &&
      from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes()) {
    side_at(stream.device_index())
        .device->copy(to.data_ptr(), from.data_ptr(), to.nbytes(), raw(stream));
    return to;
  }
  if ((from.is_cpu() || to.is_cpu()) && !in_fallback) ++copies;
  const auto [kept, source] = from.is_cpu() ? OnHost{{}, from} : on_host(from);
  if (to.is_cpu()) {
    to.copy_(source);
    return to;
  }
  if (to.numel() == 0) return to;
  auto [data, view] = whole ? garbage_like(to) : on_host(to);
  view.copy_(source);
  uploads().put(to.data_ptr(), std::move(data), stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  if (to.storage().nbytes() < extent(to)) {
    const c10::DeviceGuard guard(to.device());
    c10::StorageImpl& storage = *to.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(memory.allocate(extent(to)));
    storage.set_nbytes(extent(to));
  }
  return copy_from(from, to, false);
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Scalar local_scalar(const at::Tensor& x) { return x.cpu().item(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool before = std::exchange(in_fallback, true);
  at::native::cpu_fallback(op, stack);
  in_fallback = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
}

// `device`: a capsule of _emulated.open_device(), the next one.
void add(const py::capsule& device) {
  auto* side = new Side;
  side->device = *device.get_pointer<std::shared_ptr<Device>>();
  for (void*& stream : side->streams) stream = side->device->make_stream();
  sides().push_back(side);
}

uintptr_t stream_of_thread(int device) {
  return reinterpret_cast<uintptr_t>(raw(current(static_cast<DeviceIndex>(device))));
}

// Makes the stream of this number the thread's current one; gives the number of the one before.
c10::StreamId use_stream(int device, c10::StreamId id) {
  return std::exchange(current_streams.at(static_cast<size_t>(device)), id);
}

}  // namespace

PYBIND11_MODULE(_emulated_torch, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // torch keeps it
  module.def("add", &add);
  module.def("set_query", [](uintptr_t at) { query = reinterpret_cast<Query>(at); });
  module.def("stream", &stream_of_thread);
  module.def("waits", [] { return waits.load(); });
  module.def("copies", [] { return copies.load(); });
  module.def("use_stream", &use_stream);
}
