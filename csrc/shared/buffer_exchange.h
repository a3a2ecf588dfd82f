// First step of a call on larger arrays: each rank publishes the addresses of its arrays, and all
// ranks derive the same access mode from the published addresses.
//
//   zero_copy     all arrays that peers use are in heaps, which all ranks have mapped
//   staged        data is copied through slots
//
// Each mode has its task: zero_copy_task.h, staged_task.h.
#pragma once

#include <vector>

#include "shared/flag_task.h"

namespace pycomm::shared {

enum class AccessMode { zero_copy, staged };

// Addresses at which this process has mapped the arrays of a rank, if it has.
struct RemoteBuffer {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
};

class BufferExchange final : public FlagTask {
 public:
  // Whether a call needs this exchange; the same on all ranks.
  static bool applies_to(const engine::Job& job, const SharedMemoryRegion& region);

  BufferExchange(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job);

  bool advance() override;
  bool done() const override { return exchanged_; }
  // Valid once done().
  AccessMode access_mode() const { return mode_; }
  const std::vector<RemoteBuffer>& buffers() const { return buffers_; }

 private:
  struct Needed;
  struct BufferDescriptor;
  void publish_buffer();
  BufferDescriptor descriptor_of(int peer) const;
  RemoteBuffer remote_buffer_of(int peer, const BufferDescriptor& descriptor) const;
  void choose_access_mode();

  bool published_ = false, exchanged_ = false;
  AccessMode mode_ = AccessMode::staged;
  std::vector<RemoteBuffer> buffers_;  // by rank
};

}  // namespace pycomm::shared
