#include "device/host_staging_channel.h"

#include <utility>

namespace pycomm::device {
namespace {

constexpr size_t kAligned = 64;

}  // namespace

HostStagingChannel::HostStagingChannel(std::shared_ptr<Device> device, void* stream,
                                       std::unique_ptr<HostTransport> transport)
    : device_(std::move(device)),
      stream_(stream),
      transport_(std::move(transport)),
      staging_(device_, GrowableBuffer::Where::host),
      callbacks_(device_, stream_) {}

HostStagingChannel::~HostStagingChannel() {
  if (callbacks_.stop()) transport_->abort("the device group was destroyed during the call");
}

size_t HostStagingChannel::staged_bytes(size_t bytes) {
  return (bytes + kAligned - 1) / kAligned * kAligned;
}

// The stages of a stream run one after another, so each may use all of the memory.
void HostStagingChannel::begin(std::span<const PeerMessage> messages,
                               std::chrono::nanoseconds timeout) {
  std::byte* free = staging_.data();
  std::vector<PeerMessage> staged(messages.begin(), messages.end());
  for (PeerMessage& message : staged) {
    std::byte* const device_data = std::exchange(message.data, free);
    free += staged_bytes(message.bytes);
    if (message.sends)
      device_->copy(message.data, device_data, message.bytes, stream_);
    else
      copies_.push_back({device_data, message.data, message.bytes});
  }
  const auto body = [this, staged = std::move(staged), timeout] { exchange(staged, timeout); };
  callbacks_.begin(body, device_->capturing(stream_));
}

void HostStagingChannel::end() {
  callbacks_.stream_wait();
  for (const CopyBack& copy_back : std::exchange(copies_, {}))
    device_->copy(copy_back.to, copy_back.from, copy_back.bytes, stream_);
}

// Runs on the callback thread.
void HostStagingChannel::exchange(std::span<const PeerMessage> messages,
                                  std::chrono::nanoseconds timeout) noexcept {
  std::optional<Error> error;
  try {
    transport_->exchange(messages, timeout);
    return;
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::exception& thrown) {  // e.g. std::bad_alloc
    error = InternalError(thrown.what());
  }
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::optional<Error> HostStagingChannel::async_error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void HostStagingChannel::abort(const std::string& reason) noexcept {
  (void)callbacks_.stop();
  transport_->abort(reason);
}

}  // namespace pycomm::device
