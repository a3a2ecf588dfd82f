#include "device/growable_buffer.h"

#include <algorithm>
#include <string>

#include "core/errors.h"

namespace pycomm::device {

void GrowableBuffer::Release::operator()(std::byte* memory) const {
  if (where == Where::host)
    device->release_host(memory);
  else
    device->release(memory);
}

void GrowableBuffer::reserve(size_t bytes, void* caller) {
  if (bytes <= bytes_) return;
  const bool host = where_ == Where::host;
  if (device_->capturing(caller))
    throw Unsupported("cannot capture this call into a graph: it needs " + std::to_string(bytes) +
                      " bytes of " + (host ? "host memory" : "scratch") + ", and only " +
                      std::to_string(bytes_) +
                      " are allocated; make the same call once before the capture");
  const size_t larger = std::max(bytes, 2 * bytes_);
  void* const memory = host ? device_->allocate_host(larger) : device_->allocate(larger);
  blocks_.emplace_back(static_cast<std::byte*>(memory), Release{device_, where_});
  bytes_ = larger;
}

}  // namespace pycomm::device
