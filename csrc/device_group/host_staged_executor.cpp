// Host-staged calls, for ranks of which some share a GPU, which NCCL refuses: arrays are copied to
// host memory, where a group of the same ranks runs the collective.
//
//   caller   ... x is ready | event                                          event | ...
//   executor                  wait | copy to the host | wait | copy back    |
//   callback thread                                    the collective
//
// That group is separate from the host group: its calls run when the device reaches them, at a
// different point between the host group's calls on each rank.
#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "device/growable_buffer.h"
#include "device/host_callback_thread.h"
#include "device_group/device_executor.h"
#include "group/check.h"

namespace pycomm::device_group {
namespace {

constexpr size_t kAligned = 64;

size_t aligned(size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

class HostStagedExecutor final : public DeviceExecutor {
 public:
  // `of_two`: for messages between the two ranks of `data`.
  HostStagedExecutor(std::shared_ptr<device::Device> device, std::shared_ptr<group::Group> data,
                     bool of_two)
      : device_(std::move(device)),
        data_(std::move(data)),
        of_two_(of_two),
        stream_(device_),
        events_(std::make_shared<device::EventPool>(device_)),
        staging_(device_, device::GrowableBuffer::Where::host),
        callbacks_(device_, stream_.raw()) {}
  ~HostStagedExecutor() override {
    if (callbacks_.stop()) data_->abort("the device group was destroyed during the call");
  }

  Algorithm algorithm_for(const group::Call& call) const override;
  DeviceCall prepare(const group::Call& call) override;
  std::shared_ptr<device::Event> enqueue(const DeviceCall& device_call,
                                         device::Event& before) override;
  Algorithm algorithm_for_messages() const override { return Algorithm::host_staged; }
  void prepare_messages(std::span<const group::Call> messages) override;
  std::shared_ptr<device::Event> enqueue_messages(std::span<const group::Call> messages,
                                                  device::Event& before) override;
  bool is_connected(const group::Call& /*message*/) const override { return true; }
  group::Stats stats() const override {
    const group::Stats sent = data_->stats();
    return {.frames_sent = sent.frames_sent,
            .bytes_sent = sent.bytes_sent,
            .algorithm = Algorithm::host_staged};
  }

  std::optional<Error> async_error(const std::string& what) override;
  void close(const Deadline& /*deadline*/) noexcept override { data_->close(); }
  void abort(const std::string& reason) noexcept override {
    (void)callbacks_.stop();
    data_->abort(reason);
  }

 private:
  // Sizes of a call's arrays in bytes, and the offset of the output in the staging buffer.
  struct Layout {
    size_t input, output, output_at;
  };
  Layout layout_of(const group::Call& call) const;
  void run(const std::function<void()>& body) noexcept;

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<group::Group> data_;
  const bool of_two_;
  device::Stream stream_;
  std::shared_ptr<device::EventPool> events_;
  device::GrowableBuffer staging_;
  std::mutex mutex_;                      // guards error_
  std::optional<Error> error_;            // the first error of data_
  device::HostCallbackThread callbacks_;  // last member: its thread ends before the members it uses
};

Algorithm HostStagedExecutor::algorithm_for(const group::Call& call) const {
  if (call.algorithm == Algorithm::nccl)
    group::throw_unsupported(
        call, "NCCL refuses ranks that share a GPU; omit the algorithm or choose another");
  if (call.algorithm == Algorithm::symmetric_memory)
    group::throw_unsupported(call,
                             "the algorithm symmetric_memory needs a GPU for each rank, and ranks "
                             "share one here; omit the algorithm or choose another");
  return call.algorithm == Algorithm::automatic ? Algorithm::host_staged : call.algorithm;
}

HostStagedExecutor::Layout HostStagedExecutor::layout_of(const group::Call& call) const {
  const group::Extent extent = group::extent_of(call, data_->rank(), data_->size());
  const size_t each = bytes_of(call.dtype);
  const bool in_place = call.input == call.output;
  return {extent.input * each, extent.output * each, in_place ? 0 : aligned(extent.input * each)};
}

DeviceCall HostStagedExecutor::prepare(const group::Call& call) {
  const Layout layout = layout_of(call);
  staging_.reserve(std::max(layout.input, layout.output_at + layout.output), call.device.stream);
  return {.call = call};
}

std::shared_ptr<device::Event> HostStagedExecutor::enqueue(const DeviceCall& device_call,
                                                           device::Event& before) {
  const group::Call& call = device_call.call;
  const Layout layout = layout_of(call);
  const bool gives_output = call.operation == Operation::broadcast && call.peer == data_->rank();
  std::byte* const staging = staging_.data();
  std::byte* const output = staging + layout.output_at;
  group::Call here = call;
  here.input = layout.input > 0 ? staging : nullptr;
  here.output = layout.output > 0 ? output : nullptr;
  here.source = nullptr;  // set earlier; its owner may be gone
  if (call.algorithm == Algorithm::host_staged) here.algorithm = Algorithm::automatic;

  auto end_event = events_->take();
  before.stream_wait(stream_.raw());
  if (layout.input > 0) device_->copy(staging, call.input, layout.input, stream_.raw());
  if (gives_output) device_->copy(output, call.output, layout.output, stream_.raw());
  const auto body = [this, here] { run([&] { data_->run(here); }); };
  callbacks_.begin(body, device_->capturing(call.device.stream));
  callbacks_.stream_wait();
  if (layout.output > 0 && !gives_output)
    device_->copy(call.output, output, layout.output, stream_.raw());
  end_event->record(stream_.raw());
  return end_event;
}

void HostStagedExecutor::prepare_messages(std::span<const group::Call> messages) {
  size_t bytes = 0;
  for (const group::Call& call : messages) bytes += aligned(call.count * bytes_of(call.dtype));
  if (!messages.empty()) staging_.reserve(bytes, messages.front().device.stream);
}

std::shared_ptr<device::Event> HostStagedExecutor::enqueue_messages(
    std::span<const group::Call> messages, device::Event& before) {
  std::vector<group::Call> staged(messages.begin(), messages.end());
  auto end_event = events_->take();
  before.stream_wait(stream_.raw());
  std::byte* free = staging_.data();
  for (group::Call& call : staged) {
    const size_t bytes = call.count * bytes_of(call.dtype);
    std::byte* const here = std::exchange(free, free + aligned(bytes));
    if (call.operation == Operation::send && bytes > 0)
      device_->copy(here, call.input, bytes, stream_.raw());
    if (call.operation == Operation::send)
      call.input = here;
    else
      call.output = here;
    if (of_two_) call.peer = 1 - data_->rank();
    call.source = nullptr;  // set earlier; its owner may be gone
    call.algorithm = Algorithm::automatic;
  }
  const auto body = [this, staged] { run([&] { data_->exchange(staged); }); };
  callbacks_.begin(body, device_->capturing(messages.front().device.stream));
  callbacks_.stream_wait();
  for (size_t i = 0; i < staged.size(); ++i)
    if (const size_t bytes = staged[i].count * bytes_of(staged[i].dtype);
        staged[i].operation == Operation::recv && bytes > 0)
      device_->copy(messages[i].output, staged[i].output, bytes, stream_.raw());
  end_event->record(stream_.raw());
  return end_event;
}

// On the callback thread. Stores the error before the stream continues.
void HostStagedExecutor::run(const std::function<void()>& body) noexcept {
  std::optional<Error> error;
  try {
    body();
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::exception& thrown) {  // out of memory
    error = InternalError(thrown.what(), {.rank = data_->rank()});
  }
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::optional<Error> HostStagedExecutor::async_error(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (!error_) return std::nullopt;
  return Error(error_->kind(), what + ", staged in host memory: " + error_->what(),
               error_->fields());
}

}  // namespace

std::unique_ptr<DeviceExecutor> make_host_staged_executor(const std::shared_ptr<group::Group>& host,
                                                          std::shared_ptr<device::Device> device) {
  return std::make_unique<HostStagedExecutor>(std::move(device), host->split(0, host->rank()),
                                              false);
}

std::unique_ptr<DeviceExecutor> make_host_staged_executor_of_two(
    std::shared_ptr<group::Group> pair, std::shared_ptr<device::Device> device) {
  return std::make_unique<HostStagedExecutor>(std::move(device), std::move(pair), true);
}

}  // namespace pycomm::device_group
