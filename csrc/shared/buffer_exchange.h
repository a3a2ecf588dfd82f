// How a call on larger arrays begins: each rank publishes where its arrays are, and all ranks
// derive the same access mode from what all have published.
//
//   zero_copy     all arrays that others use are in heaps, which all ranks have mapped
//   remote_read   ranks may read each other's processes, and do
//   staged        through slots
//
// Each mode has its task: zero_copy_task.h, remote_read_task.h, staged_task.h. Where slots and
// reading are both possible the lowest rank chooses for all: it tries both from time to time.
// Called by shared_call.h.
#pragma once

#include <sys/types.h>

#include <vector>

#include "shared/flag_task.h"

namespace pycomm {

enum class AccessMode { zero_copy, remote_read, staged };

// Where a rank's arrays lie: as mapped here, if they are, and in its own process.
struct RemoteBuffer {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  uint64_t input_at = 0, output_at = 0;
  pid_t process = 0;
};

class BufferExchange final : public FlagTask {
 public:
  // Whether a call begins so; all find the same.
  static bool applies_to(const SharedJob& job, const SharedMemoryRegion& region);

  // `prefers_remote_read`: what the lowest rank chooses where both ways are possible.
  BufferExchange(Engine& engine, SharedMemoryRegion& region, const SharedJob& job,
                 const Header& header, bool prefers_remote_read);

  bool advance() override;
  bool done() const override { return exchanged_; }
  // Once it is done.
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

}  // namespace pycomm
