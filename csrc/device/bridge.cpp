#include "device/bridge.h"

#include <utility>

namespace pycomm {
namespace {

constexpr size_t kAligned = 64;

}  // namespace

Bridge::Bridge(std::shared_ptr<Device> device, void* stream, std::unique_ptr<HostPost> post)
    : device_(std::move(device)),
      stream_(stream),
      post_(std::move(post)),
      staging_(device_, Workspace::Where::host),
      relay_(device_, stream_) {}

Bridge::~Bridge() {
  if (relay_.stop()) post_->abort("the group on devices ended during the call");
}

size_t Bridge::staged_bytes(size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

// Stages of a stream come after one another, and each may use all of the memory.
void Bridge::begin(std::span<const Parcel> parcels, std::chrono::nanoseconds timeout) {
  std::byte* free = staging_.data();
  std::vector<Parcel> staged(parcels.begin(), parcels.end());
  for (Parcel& parcel : staged) {
    std::byte* const there = std::exchange(parcel.data, free);
    free += staged_bytes(parcel.bytes);
    if (parcel.sends)
      device_->copy(parcel.data, there, parcel.bytes, stream_);
    else
      landings_.push_back({there, parcel.data, parcel.bytes});
  }
  const auto body = [this, staged = std::move(staged), timeout] { carry(staged, timeout); };
  relay_.begin(body, device_->capturing(stream_));
}

void Bridge::end() {
  relay_.hold();
  for (const Landing& landing : std::exchange(landings_, {}))
    device_->copy(landing.to, landing.from, landing.bytes, stream_);
}

// On the relay's thread.
void Bridge::carry(std::span<const Parcel> parcels, std::chrono::nanoseconds timeout) noexcept {
  std::optional<Error> error;
  try {
    post_->exchange(parcels, timeout);
    return;
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::exception& thrown) {  // of memory that there is not
    error = InternalError(thrown.what());
  }
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::optional<Error> Bridge::trouble() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Bridge::abort(const std::string& reason) noexcept {
  (void)relay_.stop();
  post_->abort(reason);
}

}  // namespace pycomm
