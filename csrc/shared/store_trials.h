// Which stores a call uses for data that peers read, and the time of the chunks that it measures.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/deadline.h"
#include "shared/online_tuner.h"
#include "shared/segment.h"

namespace pycomm::shared {

// Ranks that both write and read measure their own steps. In one direction, the rank that writes
// lets the others read each measured chunk before it writes the next one, and measures both.
class StoreTrials {
 public:
  StoreTrials() = default;  // plain stores, always
  // `measures`: whether this rank does.
  StoreTrials(OnlineTuner& tuner, bool measures, bool one_way, uint64_t chunks)
      : tuner_(&tuner), measures_(measures), one_way_(one_way) {
    if (!measures) return;
    counted_ = std::exchange(tuner.turns, tuner.turns + chunks);
    tuner.advance_to(counted_);
  }

  bool nontemporal(uint64_t chunk) const {
    if (tuner_ == nullptr) return false;
    return measures_ ? tuner_->uses_second(counted_ + chunk) : tuner_->prefers_second();
  }
  // Runs a step of the chunk. `fills`: the step that writes.
  template <typename Step>
  void run(uint64_t chunk, bool fills, const Step& step) {
    if (!tries(chunk)) return step();
    const auto start = Clock::now();
    if (one_way_ && fills) filling_ = start;
    step();
    if (!one_way_) spent_[chunk % kSlots] += Clock::now() - start;
  }
  // This rank is done with the chunk of `bytes`.
  void end(uint64_t chunk, size_t bytes) {
    if (!one_way_ && tries(chunk)) record(chunk, bytes, std::exchange(spent_[chunk % kSlots], {}));
  }
  // In one direction: whether the last chunk is measured until it is read.
  bool await_readers() const { return filling_.has_value(); }
  void have_read(uint64_t chunk, size_t bytes) {
    record(chunk, bytes, Clock::now() - *std::exchange(filling_, {}));
  }

 private:
  bool tries(uint64_t chunk) const { return measures_ && tuner_->tries(counted_ + chunk); }
  void record(uint64_t chunk, size_t bytes, Clock::duration spent) {
    const std::chrono::duration<double, std::nano> ns = spent;
    tuner_->record_cost(counted_ + chunk, ns.count() / static_cast<double>(bytes));
  }

  OnlineTuner* tuner_ = nullptr;
  bool measures_ = false, one_way_ = false;
  uint64_t counted_ = 0;                         // chunks before this call
  std::array<Clock::duration, kSlots> spent_{};  // on each measured chunk
  std::optional<Clock::time_point> filling_{};   // since when
};

}  // namespace pycomm::shared
