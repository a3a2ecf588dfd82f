// Base of the tasks of this folder: tickets, flags that peers wait for, and headers that must
// agree. segment.h documents the flags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/engine.h"
#include "shared/shared_memory_region.h"

namespace pycomm::shared {

class FlagTask : public engine::Task {
 public:
  int sending_to() const override { return collectives::kNoRank; }
  int receiving_from() const override {
    return awaited_ == collectives::kNoRank ? collectives::kNoRank : region_.member(awaited_);
  }
  std::optional<bool> leave_processor_of_peer(os::ProcessorExclusion& exclusion) override;
  void arm() override;
  void disarm() override;

 protected:
  // The task takes the next `tickets` tickets, from a multiple of `align` on.
  FlagTask(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job,
           uint64_t tickets, uint64_t align = 1);

  // Whether a flag of `peer` is below `need`. If so, this rank waits for that flag.
  bool is_missing(int peer, const Flag<>& flag, uint64_t need);
  // Whether all ranks have read the previous contents of the ticket's slot.
  bool may_fill(uint64_t ticket);
  // Whether `peer` has filled its slot. Ends the call if the slot belongs to a different call.
  bool has_filled(int peer, uint64_t ticket);
  bool have_reduced(uint64_t ticket);
  // Whether no rank has aborted this call.
  bool all_in_call();
  // Publishes the filled slot. `now` = false: the next publish() or wake_sleepers() wakes the
  // peers.
  void publish_filled(uint64_t ticket, bool now = true);
  void publish(Flag<>& flag, uint64_t value);
  // Wakes the peers that sleep until a flag changes.
  void wake_sleepers();

  engine::Engine& engine_;
  SharedMemoryRegion& region_;
  const engine::Job& job_;
  int rank_, size_;  // in the region
  uint64_t first_;   // ticket
  int awaited_ = collectives::kNoRank;

 private:
  [[noreturn]] void throw_mismatch(int peer, uint64_t ticket);

  transport::Header before_{};
  uint32_t signature_ = 0;
  const Flag<>* awaited_flag_ = nullptr;
  uint64_t awaited_value_ = 0;
};

}  // namespace pycomm::shared
