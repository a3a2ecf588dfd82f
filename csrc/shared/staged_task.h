// Staged access within one host: ranks read each other's slots in shared memory, without messages.
//
// A call is cut into chunks. For each chunk a rank copies the data for its peers into its slot
// (fill), reduces its piece from all slots (reduce), and copies the peers' results (collect):
//
//   all_reduce, two ranks, large        rank 0              rank 1
//     fill      into one's own slot     its piece 1         its piece 0
//     reduce    one's own piece         0: own + slot 1     1: slot 0 + own   -> output and slot
//     collect   the other's piece       1 from slot 1       0 from slot 0
//
// Each element of an array is read once and written once in memory; slots stay in the caches. Small
// arrays are filled whole, and every rank reduces all of it (one phase instead of two). Sums are
// always added in rank order. No output is written before every rank's signature was checked,
// except by broadcast and scatter, as with plans.
//
// The engine runs this task and handles waiting, deadlines and failures.
#pragma once

#include "shared/flag_task.h"
#include "shared/nontemporal_copy.h"
#include "shared/store_trials.h"

namespace pycomm::shared {

class StagedTask final : public FlagTask {
 public:
  StagedTask(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job);

  bool advance() override;
  bool done() const override { return collected_ == chunks_; }

 private:
  // A chunk: elements [begin, begin + count) of every row.
  struct Chunk {
    uint64_t ticket;
    size_t begin, count;
  };
  Chunk chunk(uint64_t i) const;
  bool fills() const;
  bool reduces() const;
  bool collects() const;
  bool have_filled(uint64_t ticket);
  bool waits_for_readers();
  StoreTrials begin_stores(size_t call_bytes);
  void work(uint64_t i, void (StagedTask::*step)(const Chunk&));
  void copy_to_slot(std::byte* into, const std::byte* from, size_t bytes);
  void copy_from_slot(std::byte* into, const std::byte* from, size_t bytes);
  void fill(const Chunk& chunk);
  void reduce(const Chunk& chunk);
  void collect(const Chunk& chunk);
  struct Sum;
  void combine(const Sum& sum, uint64_t ticket);
  void end_nontemporal();
  std::byte* slot(int rank, uint64_t ticket) const;
  std::byte* slot_of_sums(int rank, uint64_t ticket) const;
  size_t bytes(size_t count) const { return count * job_.element_bytes; }
  const std::byte* row(int i, const Chunk& chunk) const;
  std::byte* out_row(int i, const Chunk& chunk) const;

  int parts_;              // ranks that have a part
  bool tiny_ = false;      // data is stored in the flags' cache lines
  bool wake_due_ = false;  // for the flag of a filled slot
  bool two_shots_ = false;
  StoreTrials stores_;
  bool nontemporal_ = false;  // the current chunk uses non-temporal stores
  uint64_t span_ = 1;         // slots, and tickets, of a chunk
  size_t chunk_count_ = 0;    // elements of a row per chunk
  uint64_t chunks_ = 1;
  OutputCopy to_output_;
  uint64_t filled_ = 0, reduced_ = 0, collected_ = 0;
};

}  // namespace pycomm::shared
