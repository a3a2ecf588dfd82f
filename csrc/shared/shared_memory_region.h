// The segments of the ranks of a group on this host. One region per group; its calls run in the
// group's order. In this file "rank" or "number" is the index within the host.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "os/processor.h"
#include "os/shared_heap.h"
#include "shared/online_tuner.h"
#include "shared/segment.h"

namespace pycomm::shared {

class SharedMemoryRegion {
 public:
  // `segments` by number, including this rank's own at `rank`; `members`: their ranks in the group.
  SharedMemoryRegion(std::vector<std::shared_ptr<Segment>> segments, std::vector<int> members,
                     int rank)
      : segments_(std::move(segments)),
        members_(std::move(members)),
        rank_(rank),
        known_done_(segments_.size()) {}

  int rank() const { return rank_; }
  int member(int rank) const { return members_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(segments_.size()); }
  Segment& own() const { return of(rank_); }
  Segment& of(int rank) const { return *segments_[static_cast<size_t>(rank)]; }

  // By number. Call it before the first collective.
  void set_heaps(std::vector<os::HeapView> heaps) { heaps_ = std::move(heaps); }
  // Whether every rank has a heap that all ranks mapped; the same on all ranks.
  bool has_heaps() const { return !heaps_.empty(); }
  const os::HeapView& heap(int rank) const { return heaps_[static_cast<size_t>(rank)]; }

  // Publishes the current call of this rank, for peers that wait for it in another call.
  void begin(const transport::Header& header);
  // Publishes the processor on which this thread runs, and returns it.
  int publish_processor();
  // The last one that `peer` published; kUnknownProcessor if none.
  int processor_of(int peer) const {
    return of(peer).begun.processor.load(std::memory_order_relaxed) - 1;
  }
  // Publishes that this rank aborted its current call.
  void abort_call();
  // Whether `peer` is in the same call.
  bool is_in(int peer, const transport::Header& header) const;
  // Call it before the first take() of an epoch. True if the epoch is new.
  bool begin_epoch(uint16_t epoch);
  // Returns the first of `count` new tickets, a multiple of `align`.
  uint64_t take(uint64_t count, uint64_t align) {
    const uint64_t first = (next_ + align - 1) / align * align;
    next_ = first + count;
    return first;
  }
  // The first ticket of this epoch. Slots of earlier epochs are free once `done` reaches it.
  uint64_t base() const { return base_; }
  // The last value read from the `done` flag of a peer.
  uint64_t& known_done(int peer) { return known_done_[static_cast<size_t>(peer)]; }
  // True if `peer` is in a different call at the same sequence number; `theirs` is its header.
  bool differs(int peer, const transport::Header& mine, transport::Header& theirs) const;
  // True if `peer` is in a later call of the same epoch; `theirs` is its header.
  bool is_past(int peer, const transport::Header& mine, transport::Header& theirs) const;

  // The previous call in the epoch, and the signature of it and all earlier ones.
  transport::Header last{};
  uint32_t signature = 0;
  // Selects plain or non-temporal stores for data that peers read, by size of the call. Between
  // processors that share a cache plain stores are faster, because the reader finds the data in
  // that cache. Between distant processors they are four times slower (1 MiB on an EPYC, 160 ns
  // apart), because each store first takes its line from the reader's cache. Chunks are counted. In
  // calls in both directions all ranks count the same number, so they measure at the same time.
  OnlineTuner& store_tuner(size_t bytes, bool one_way) {
    const size_t of_size = bytes < (size_t{256} << 10) ? 0 : bytes < (size_t{4} << 20) ? 1 : 2;
    return stores_[of_size + (one_way ? 3 : 0)];
  }
  // The places of the own segment's values that are in use, one bit each. Any thread may change it.
  std::atomic<uint32_t> used_values{0};
  // Since the group was created: bytes that this rank wrote for peers, and read from theirs.
  uint64_t bytes_sent = 0, bytes_received = 0;

 private:
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<int> members_;
  std::vector<os::HeapView> heaps_;  // by number, or empty
  int rank_;
  std::vector<uint64_t> known_done_;
  // In the long run 8 of 2,048 chunks are trials, half of them with the slower stores: a trial for
  // each 128 MiB. The first chunks fault their pages in.
  std::vector<OnlineTuner> stores_{6, OnlineTuner{kSlots, 8, 2048}};
  uint16_t epoch_ = 0;
  uint64_t base_ = 0, next_ = 0;
};

}  // namespace pycomm::shared
