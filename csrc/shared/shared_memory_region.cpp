#include "shared/shared_memory_region.h"

#include "engine/engine.h"

namespace pycomm::shared {
namespace {

// After a mismatch some ranks have used tickets that others have not. So every epoch begins at a
// number above all earlier ones.
constexpr int kEpochShift = 40;

// Never 0, the value in a new segment.
uint64_t number_of(const transport::Header& header) {
  return (uint64_t{1} << 63) | (uint64_t{header.epoch} << 32) | header.sequence;
}

}  // namespace

void SharedMemoryRegion::begin(const transport::Header& header) {
  own().begun.call.publish(number_of(header), header);
  (void)publish_processor();
}

int SharedMemoryRegion::publish_processor() {
  const int processor = os::current_processor();
  own().begun.processor.store(processor + 1, std::memory_order_relaxed);
  return processor;
}

void SharedMemoryRegion::abort_call() { own().begun.call.withdraw(); }

bool SharedMemoryRegion::is_in(int peer, const transport::Header& header) const {
  return of(peer).begun.call.number() == number_of(header);
}

bool SharedMemoryRegion::begin_epoch(uint16_t epoch) {
  const auto epochs = static_cast<uint16_t>(epoch - epoch_);
  if (epochs == 0) return false;
  epoch_ = epoch;
  base_ = ((base_ >> kEpochShift) + epochs) << kEpochShift;
  next_ = base_;
  last = {};
  signature = 0;
  return true;
}

bool SharedMemoryRegion::differs(int peer, const transport::Header& mine,
                                 transport::Header& theirs) const {
  const auto call = of(peer).begun.call.read();
  if (!call || call->number != number_of(mine)) return false;
  theirs = call->header;
  return !engine::same_call(theirs, mine);
}

bool SharedMemoryRegion::is_past(int peer, const transport::Header& mine,
                                 transport::Header& theirs) const {
  const auto call = of(peer).begun.call.read();
  if (!call) return false;
  theirs = call->header;
  return theirs.epoch == mine.epoch && engine::order(theirs, mine.epoch, mine.sequence) > 0;
}

}  // namespace pycomm::shared
