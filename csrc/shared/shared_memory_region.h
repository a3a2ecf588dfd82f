// The segments of those ranks of a group that share this one's host. One for each group; its calls
// come one after another, as the group's do. A rank has a number here: its place among them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/operation.h"
#include "os/random.h"
#include "os/shared_heap.h"
#include "shared/online_tuner.h"
#include "shared/segment.h"

namespace pycomm {

class SharedMemoryRegion {
 public:
  // By number, this rank's own among them, at `rank`; `members` has their ranks in the group.
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

  // By number; before the first call.
  void set_heaps(std::vector<HeapView> heaps) { heaps_ = std::move(heaps); }
  // Whether all ranks have heaps that all have mapped; the same on all.
  bool has_heaps() const { return !heaps_.empty(); }
  const HeapView& heap(int rank) const { return heaps_[static_cast<size_t>(rank)]; }

  // Says which call this rank is in, for ranks that wait for it in another.
  void begin(const Header& header);
  // Says that this rank has aborted the call that it is in.
  void leave();
  // Whether `peer` is in this very call.
  bool is_in(int peer, const Header& header) const;
  // Before the first take() of an epoch; true if it is a new one.
  bool enter(uint16_t epoch);
  // The first of `count` new tickets.
  uint64_t take(uint64_t count) { return std::exchange(next_, next_ + count); }
  // The first ticket of this epoch. Slots of earlier ones are free once `done` has come so far.
  uint64_t base() const { return base_; }
  // Whether every slot was in use before: the first time costs its pages, so nothing is tried then.
  bool is_warm() const { return next_ >= kSlots; }
  // What the flag `done` of a peer was when last looked at.
  uint64_t& known_done(int peer) { return known_done_[static_cast<size_t>(peer)]; }
  // The header of the call that `peer` is in if it is another than `mine` at the same turn.
  bool differs(int peer, const Header& mine, Header& theirs) const;
  // The header of the call that `peer` is in if that is a later one of the same epoch.
  bool is_past(int peer, const Header& mine, Header& theirs) const;

  // The call before this one in the epoch, and the signature of it and all before it.
  Header last{};
  uint32_t signature = 0;
  // How a rank writes what others are to read, by size of the call: with plain stores, or with non-
  // temporal stores. Between processors that share a cache plain stores win: what was written is
  // read from there. Between distant ones they lose by four times (1 MiB on an EPYC, 160 ns apart),
  // as each store first takes its line away from the reader's cache. Chunks are counted, the same
  // number on all ranks, so all try at the same time.
  OnlineTuner& store_tuner(size_t bytes) {
    return stores_[bytes < (size_t{256} << 10) ? 0 : bytes < (size_t{4} << 20) ? 1 : 2];
  }
  // Whether private arrays are staged in slots or read from the others' processes; the lowest rank
  // decides, by operation and size of the call. Calls are counted.
  OnlineTuner& read_tuner(Operation operation, size_t bytes) {
    return read_tuners_.try_emplace({operation, std::bit_width(bytes)}, 256, 8).first->second;
  }
  // Whether this rank may read the processes of all others, as its first buffer exchange has shown.
  enum class Reach { unknown, not_all, all } reaches = Reach::unknown;
  // What who reads this process finds at its address.
  uint64_t token = std::bit_cast<std::array<uint64_t, 4>>(random_bytes())[0];
  // Since the group stands: bytes that this rank laid out for others, and took from theirs.
  uint64_t bytes_sent = 0, bytes_received = 0;

 private:
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<int> members_;
  std::vector<HeapView> heaps_;  // by number, or empty
  int rank_;
  std::vector<uint64_t> known_done_;
  // Of 2,048 chunks 16 are tries, half of them in the slower way; of 256 calls 8.
  std::array<OnlineTuner, 3> stores_{OnlineTuner{2048, 16}, OnlineTuner{2048, 16},
                                     OnlineTuner{2048, 16}};
  std::map<std::pair<Operation, int>, OnlineTuner> read_tuners_;
  uint16_t epoch_ = 0;
  uint64_t base_ = 0, next_ = 0;
};

}  // namespace pycomm
