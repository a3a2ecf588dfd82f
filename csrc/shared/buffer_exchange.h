// First step of a call on larger arrays: each rank publishes the addresses of its arrays, and all
// ranks derive the same access mode from the published addresses.
//
//   zero_copy     all arrays that peers use are in heaps, which all ranks have mapped
//   remote_read   each rank reads the memory of its peers' processes
//   staged        data is copied through slots
//
// Each mode has its task: zero_copy_task.h, remote_read_task.h, staged_task.h. If both slots and
// remote reads are possible, the lowest rank chooses for all ranks: it times both periodically.
#pragma once

#include <sys/types.h>

#include <vector>

#include "shared/flag_task.h"

namespace pycomm::shared {

enum class AccessMode { zero_copy, remote_read, staged };

// Addresses of a rank's arrays: mapped into this process (if they are), and in its own process.
struct RemoteBuffer {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  uint64_t input_at = 0, output_at = 0;
  pid_t process = 0;
};

class BufferExchange final : public FlagTask {
 public:
  // Whether a call needs this exchange; the same on all ranks.
  static bool applies_to(const SharedJob& job, const SharedMemoryRegion& region);

  // `prefers_remote_read`: the choice of the lowest rank if both modes are possible.
  BufferExchange(engine::Engine& engine, SharedMemoryRegion& region, const SharedJob& job,
                 const transport::Header& header, bool prefers_remote_read);

  bool advance() override;
  bool done() const override { return exchanged_; }
  // Valid once done().
  AccessMode access_mode() const { return mode_; }
  bool can_read_remotely() const { return can_read_remotely_; }
  const std::vector<RemoteBuffer>& buffers() const { return buffers_; }

 private:
  struct Needed;
  struct BufferDescriptor;
  bool are_readable(const Needed& needed) const;
  void publish_buffer();
  BufferDescriptor descriptor_of(int peer) const;
  RemoteBuffer remote_buffer_of(int peer, const BufferDescriptor& descriptor) const;
  void choose_access_mode();
  bool reaches_all() const;

  const SharedJob& job_;
  bool prefers_remote_read_;
  bool published_ = false, exchanged_ = false, can_read_remotely_ = false;
  AccessMode mode_ = AccessMode::staged;
  std::vector<RemoteBuffer> buffers_;  // by rank
};

}  // namespace pycomm::shared
