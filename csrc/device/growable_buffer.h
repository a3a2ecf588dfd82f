// Scratch memory of the calls on a stream, on the device or on its host. It grows before a call
// that needs more.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/device.h"

namespace pycomm::device {

class GrowableBuffer {
 public:
  enum class Where { device, host };
  GrowableBuffer(std::shared_ptr<Device> device, Where where)
      : device_(std::move(device)), where_(where) {}

  // Ensures that data() has at least `bytes` bytes. Throws Unsupported if it would have to grow
  // while `caller`, the stream of the call, is being captured into a graph.
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
  // The last block is in use. Older ones are kept, because enqueued work or a graph may hold their
  // addresses. Each is at least twice as large as the one before, so all together take at most
  // twice the last.
  std::vector<std::unique_ptr<std::byte, Release>> blocks_;
  size_t bytes_ = 0;
};

}  // namespace pycomm::device
