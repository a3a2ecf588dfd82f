// The second strategy inside one host: ranks read each other's memory directly, without messages.
//
// A call is cut into chunks. For each of them a rank fills its slot with what the others are to
// read, reduces what is its part out of all slots, and collects what the others have made:
//
//   all_reduce, two ranks, large        rank 0              rank 1
//     fill      into one's own slot     its piece 1         its piece 0
//     reduce    one's own piece         0: own + slot 1     1: slot 0 + own   -> output and slot
//     collect   the other's piece       1 from slot 1       0 from slot 0
//
// Each element of an array is read once and written once in memory; what passes through slots stays
// in the caches. Small arrays are filled whole and every rank reduces all of it (one shot instead
// of two). Sums are added in rank order, always. Nothing is written to an output before every
// rank's signature was seen, except by broadcast and scatter, as with plans.
//
// Not the engine: that drives this task, and does its waiting, deadlines and failures.
#pragma once

#include <array>
#include <span>

#include "core/operation.h"
#include "engine/engine.h"
#include "kernels/kernels.h"
#include "shared/arena.h"

namespace pycomm {

struct SharedJob {
  Operation operation = Operation::barrier;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t count = 0, element_bytes = 1;  // count as in group.h
  int root = 0;                         // as the arena counts
  const Reducer* reducer = nullptr;
  bool folds = false;    // 16-bit sums: all summands at once, rounded once
  bool finishes = true;  // else the last addition is like the others, and others are to follow
  // Of reduce_scatter and all_gather: as many ranks, the first ones, have a part; 0: all.
  int parts = 0;
};

// Whether a call can be carried out here.
bool is_shared(Operation operation);

class SharedRun final : public Task {
 public:
  // `header` with its epoch and sequence.
  SharedRun(Engine& engine, Arena& arena, const SharedJob& job, const Header& header);

  bool advance() override;
  bool done() const override { return collected_ == chunks_; }
  int sending_to() const override { return kNobody; }
  int receiving_from() const override;
  void arm() override;
  void disarm() override;

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
  bool lacks(int peer, const std::atomic<uint64_t>& flag, uint64_t need);
  bool may_fill(uint64_t ticket);
  bool have_filled(uint64_t ticket);
  bool have_reduced(uint64_t ticket);
  bool has_filled(int peer, uint64_t ticket);
  [[noreturn]] void disagree(int peer, uint64_t ticket);
  void begin_stores(size_t call_bytes);
  void work(uint64_t i, void (SharedRun::*step)(const Chunk&));
  void end_trial(uint64_t i);
  void lay_out(std::byte* into, const std::byte* from, size_t bytes);
  void take(std::byte* into, const std::byte* from, size_t bytes);
  void fill(const Chunk& chunk);
  void reduce(const Chunk& chunk);
  void collect(const Chunk& chunk);
  struct Sum;
  void combine(const Sum& sum, uint64_t ticket);
  void publish(std::atomic<uint64_t>& flag, uint64_t value);
  std::byte* slot(int rank, uint64_t ticket) const;
  size_t bytes(size_t count) const { return count * job_.element_bytes; }
  const std::byte* row(int i, const Chunk& chunk) const;
  std::byte* out_row(int i, const Chunk& chunk) const;

  Engine& engine_;
  Arena& arena_;
  const SharedJob& job_;
  const Header& header_;
  int rank_, size_;  // as the arena counts
  int parts_;        // ranks that have one
  Header before_{};
  uint32_t signature_ = 0;
  bool tiny_ = false;  // slots are the flags' own lines
  bool two_shots_ = false;
  bool learned_ = false;      // which way was faster when last tried; true: streaming
  Stores* stores_ = nullptr;  // where this call's trials count, or null
  uint64_t counted_ = 0;      // chunks before this call, as stores_ counts
  bool streaming_ = false;    // what is laid out now
  std::array<Clock::duration, kSlots> spent_{};  // in a trial, on each chunk under way
  size_t chunk_count_ = 0;                       // elements of a row in a chunk
  uint64_t chunks_ = 1, first_ = 0;
  uint64_t filled_ = 0, reduced_ = 0, collected_ = 0;
  int awaited_ = kNobody;
  const std::atomic<uint64_t>* awaited_flag_ = nullptr;
  uint64_t awaited_value_ = 0;
};

}  // namespace pycomm
