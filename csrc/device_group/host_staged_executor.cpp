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
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/host_staging_channel.h"
#include "device_group/device_executor.h"
#include "device_group/group_transport.h"
#include "group/check.h"

namespace pycomm::device_group {
namespace {

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
        channel_(device_, stream_.raw(), std::make_unique<GroupTransport>(data_)) {}

  Algorithm algorithm_for(const group::Call& call) const override;
  void prepare(Launch& launch) override;
  std::shared_ptr<device::Event> enqueue(const Launch& launch) override;
  bool is_connected(const group::Call& /*message*/) const override { return true; }
  group::Stats stats() const override {
    const group::Stats sent = data_->stats();
    return {.frames_sent = sent.frames_sent,
            .bytes_sent = sent.bytes_sent,
            .algorithm = Algorithm::host_staged};
  }

  std::optional<Error> async_error(const std::string& what) override;
  void close(const Deadline& /*deadline*/) noexcept override { channel_.close(); }
  void abort(const std::string& reason) noexcept override { channel_.abort(reason); }

 private:
  // Sizes of a call's arrays in bytes, and the offset of the output in the staging buffer.
  struct Layout {
    size_t input, output, output_at;
  };
  Layout layout_of(const group::Call& call) const;
  void run(const group::Call& call);
  void exchange(const Launch& launch);

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<group::Group> data_;
  const bool of_two_;
  device::Stream stream_;
  std::shared_ptr<device::EventPool> events_;
  device::HostStagingChannel channel_;  // last member: its thread ends before the members it uses
};

Algorithm HostStagedExecutor::algorithm_for(const group::Call& call) const {
  if (!group::is_plan(call.operation)) return Algorithm::host_staged;
  if (call.algorithm == Algorithm::nccl)
    group::throw_unsupported(
        call, "NCCL refuses ranks that share a GPU; omit the algorithm or choose another");
  return call.algorithm == Algorithm::automatic ? Algorithm::host_staged : call.algorithm;
}

HostStagedExecutor::Layout HostStagedExecutor::layout_of(const group::Call& call) const {
  const group::Extent extent = group::extent_of(call, data_->rank(), data_->size());
  const size_t each = bytes_of(call.dtype);
  const bool in_place = call.input == call.output;
  const size_t input = extent.input * each;
  return {input, extent.output * each,
          in_place ? 0 : device::HostStagingChannel::staged_bytes(input)};
}

void HostStagedExecutor::prepare(Launch& launch) {
  size_t bytes = 0;
  if (launch.has_messages()) {
    for (const group::Call& call : launch.calls)
      bytes += device::HostStagingChannel::staged_bytes(call.count * bytes_of(call.dtype));
  } else {
    const Layout layout = layout_of(launch.first());
    bytes = std::max(layout.input, layout.output_at + layout.output);
  }
  channel_.reserve(bytes, launch.stream());
}

std::shared_ptr<device::Event> HostStagedExecutor::enqueue(const Launch& launch) {
  auto end_event = events_->take();
  launch.before->stream_wait(stream_.raw());
  launch.has_messages() ? exchange(launch) : run(launch.first());
  end_event->record(stream_.raw());
  return end_event;
}

void HostStagedExecutor::run(const group::Call& call) {
  const Layout layout = layout_of(call);
  const bool gives_output = call.operation == Operation::broadcast && call.peer == data_->rank();
  std::byte* const staging = channel_.memory();
  std::byte* const output = staging + layout.output_at;
  group::Call here = call;
  here.input = layout.input > 0 ? staging : nullptr;
  here.output = layout.output > 0 ? output : nullptr;
  here.source = nullptr;  // set earlier; its owner may be gone
  if (call.algorithm == Algorithm::host_staged) here.algorithm = Algorithm::automatic;

  if (layout.input > 0) device_->copy(staging, call.input, layout.input, stream_.raw());
  if (gives_output) device_->copy(output, call.output, layout.output, stream_.raw());
  channel_.begin([this, here] { data_->run(here); });
  channel_.end();
  if (layout.output > 0 && !gives_output)
    device_->copy(call.output, output, layout.output, stream_.raw());
}

void HostStagedExecutor::exchange(const Launch& launch) {
  const auto rank_of = [this](int peer) { return of_two_ ? 1 - data_->rank() : peer; };
  const auto all = peer_messages(launch.calls, rank_of);
  if (all.empty()) return;
  channel_.begin(all, launch.first().timeout);
  channel_.end();
}

std::optional<Error> HostStagedExecutor::async_error(const std::string& what) {
  const auto error = channel_.async_error();
  if (!error) return std::nullopt;
  return Error(error->kind(), what + ", staged in host memory: " + error->what(), error->fields());
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
