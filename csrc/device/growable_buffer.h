// Memory for what calls on a stream have in the making, on the device or on its host: it grows
// before a call that needs more.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/device.h"

namespace pycomm {

class GrowableBuffer {
 public:
  enum class Where { device, host };
  GrowableBuffer(std::shared_ptr<Device> device, Where where)
      : device_(std::move(device)), where_(where) {}

  // From now on there are so many bytes at data(). Throws Unsupported where `caller`, the call's
  // stream, is being captured into a graph and there are fewer.
  void reserve(size_t bytes, void* caller);
  std::byte* data() const { return blocks_.empty() ? nullptr : blocks_.back().get(); }

 private:
  struct Release {
    std::shared_ptr<Device> device;
    Where where;
    void operator()(std::byte* memory) const;
  };
  std::shared_ptr<Device> device_;
  Where where_;
  // The last is in use; older ones stay, for what is enqueued, or a graph, may hold their
  // addresses. Each is at least twice as large as the one before, so that all together take at most
  // twice the last.
  std::vector<std::unique_ptr<std::byte, Release>> blocks_;
  size_t bytes_ = 0;
};

}  // namespace pycomm
