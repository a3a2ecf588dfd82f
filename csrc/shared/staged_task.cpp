#include "shared/staged_task.h"

#include <algorithm>
#include <utility>

#include "collectives/plan.h"
#include "core/cpu_relax.h"
#include "cpu/copy.h"
#include "shared/nontemporal_copy.h"
#include "shared/sum.h"

namespace pycomm::shared {
namespace {

// Up to this size every rank reduces everything: one exchange of flags instead of two. For two
// ranks on a Xeon, 8 KiB take 2.0 us in one exchange and 2.5 us in two, 16 KiB 3.3 and 2.8 us.
constexpr size_t kOneShotBytes = size_t{8} << 10;
// Up to this size all stores are plain.
constexpr size_t kPlainBytes = size_t{16} << 10;
// Slots that a rank fills before it collects the oldest chunk.
constexpr uint64_t kAhead = 8;
// Up to and from this size on a chunk takes one slot, and four. An EPYC takes 0.82 to 0.93 of the
// time from 512 KiB on, and 1.3 times as long for one chunk of 256 KiB.
constexpr size_t kOfOneSlot = size_t{256} << 10, kOfFourSlots = size_t{1} << 20;
// Shorter runs reach the reader's cache before non-temporal stores leave this core.
constexpr size_t kLeastStream = size_t{2} << 10;

// Whether a slot holds one row of `count` elements for each reader.
bool has_row_per_rank(Operation operation) {
  return operation == Operation::reduce_scatter || operation == Operation::scatter ||
         operation == Operation::all_to_all;
}

// Whether the root fills alone.
bool is_from_root(Operation operation) {
  return operation == Operation::broadcast || operation == Operation::scatter;
}

bool is_one_way(Operation operation) {
  return is_from_root(operation) || operation == Operation::gather;
}

int parts_of(const engine::Job& job, int size) { return job.parts == 0 ? size : job.parts; }

size_t rows_of(const engine::Job& job, int size) {
  return has_row_per_rank(job.operation) ? static_cast<size_t>(parts_of(job, size)) : 1;
}

// Of this rank's arrays; 0: plain stores suit a sum, which reads the lines that it writes.
size_t rows_moved(const engine::Job& job, int size) {
  const Operation operation = job.operation;
  if (operation == Operation::all_reduce || operation == Operation::reduce) return 0;
  const bool rows = operation == Operation::all_gather || operation == Operation::gather ||
                    operation == Operation::all_to_all;
  return rows ? static_cast<size_t>(parts_of(job, size)) + 1 : 1;
}

// The slots of a chunk. Ranks that add wait for each other in each chunk, so that long ones are
// faster. Those that only move data read one while others write the next.
uint64_t span_of(const engine::Job& job, int size) {
  const size_t whole = job.count * job.element_bytes * rows_of(job, size);
  if (whole <= kOfOneSlot || job.reducer == nullptr) return 1;
  return whole < kOfFourSlots ? 2 : 4;
}

size_t chunk_count_of(const engine::Job& job, int size) {
  const size_t bytes = span_of(job, size) * kSlotBytes;
  return std::max<size_t>(1, bytes / job.element_bytes / rows_of(job, size));
}

uint64_t chunks_of(const engine::Job& job, int size) {
  const size_t chunk = chunk_count_of(job, size);
  return std::max<uint64_t>(1, (job.count + chunk - 1) / chunk);
}

}  // namespace

StagedTask::StagedTask(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job)
    : FlagTask(engine, region, job, chunks_of(job, region.size()) * span_of(job, region.size()),
               span_of(job, region.size())),
      parts_(parts_of(job, size_)),
      span_(span_of(job, size_)),
      chunk_count_(chunk_count_of(job, size_)),
      chunks_(chunks_of(job, size_)),
      to_output_(bytes(job.count) * rows_moved(job, size_)) {
  const size_t whole = bytes(job.count) * rows_of(job, size_);
  tiny_ = whole <= kTinyBytes;
  const bool sums = job.operation == Operation::all_reduce || job.operation == Operation::reduce;
  two_shots_ = sums && whole > kOneShotBytes;
  stores_ = begin_stores(whole);
}

StagedTask::Chunk StagedTask::chunk(uint64_t i) const {
  const size_t begin = i * chunk_count_;
  return {first_ + i * span_, begin, std::min(chunk_count_, job_.count - begin)};
}

std::byte* StagedTask::slot(int rank, uint64_t ticket) const {
  Segment& segment = region_.of(rank);
  return tiny_ ? segment.filled[ticket % kSlots].tiny.data()
               : segment.slots[ticket % kSlots].data();
}

// The others read the sums of a rank's part in the next rank's slot, over what it read there. So
// its core fetches and writes the same lines: a Xeon takes 0.71 (64 KiB) to 0.85 (4 MiB) of the
// time of sums in another slot.
std::byte* StagedTask::slot_of_sums(int rank, uint64_t ticket) const {
  return slot((rank + 1) % size_, ticket);
}

const std::byte* StagedTask::row(int i, const Chunk& chunk) const {
  return job_.input + bytes(static_cast<size_t>(i) * job_.count + chunk.begin);
}

std::byte* StagedTask::out_row(int i, const Chunk& chunk) const {
  return job_.output + bytes(static_cast<size_t>(i) * job_.count + chunk.begin);
}

bool StagedTask::fills() const {
  if (job_.operation == Operation::all_gather) return rank_ < parts_;
  if (job_.operation == Operation::gather) return rank_ != job_.root;
  return !is_from_root(job_.operation) || rank_ == job_.root;
}

bool StagedTask::reduces() const {
  switch (job_.operation) {
    case Operation::all_reduce:
      return true;
    case Operation::reduce_scatter:
      return rank_ < parts_;
    case Operation::reduce:
      return two_shots_ || rank_ == job_.root;
    case Operation::broadcast:
    case Operation::all_gather:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return false;
}

bool StagedTask::collects() const {
  switch (job_.operation) {
    case Operation::all_reduce:
      return two_shots_;
    case Operation::reduce:
      return two_shots_ && rank_ == job_.root;
    case Operation::gather:
      return rank_ == job_.root;
    case Operation::broadcast:
    case Operation::scatter:
    case Operation::all_gather:
    case Operation::all_to_all:
    case Operation::barrier:
      return true;
    case Operation::reduce_scatter:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return false;
}

// Order: first the steps that peers wait for, and whose data is still in the caches.
bool StagedTask::advance() {
  awaited_ = collectives::kNoRank;
  if (collected_ < reduced_) {
    const Chunk at = chunk(collected_);
    if (!collects() || (two_shots_ ? have_reduced(at.ticket) : have_filled(at.ticket))) {
      if (collects()) work(collected_, &StagedTask::collect);
      to_output_.end();
      stores_.end(collected_, bytes(at.count));
      ++collected_;
      publish(region_.own().done, at.ticket + span_);
      wake_due_ = false;
      if (tiny_) prefetch_for_write(&region_.own().filled[(at.ticket + 1) % kSlots]);
      return true;
    }
  }
  if (reduced_ < filled_) {
    const Chunk at = chunk(reduced_);
    if (!reduces() || have_filled(at.ticket)) {
      if (reduces()) work(reduced_, &StagedTask::reduce);
      ++reduced_;
      return true;
    }
  }
  if (filled_ < chunks_ && filled_ < collected_ + kAhead / span_ && !waits_for_readers()) {
    const Chunk at = chunk(filled_);
    if (!fills() || may_fill(at.ticket + span_ - 1)) {
      if (fills()) work(filled_, &StagedTask::fill);
      ++filled_;
      return true;
    }
  }
  if (std::exchange(wake_due_, false)) wake_sleepers();
  return false;
}

bool StagedTask::have_filled(uint64_t ticket) {
  if (is_from_root(job_.operation)) return has_filled(job_.root, ticket);
  const int fillers = job_.operation == Operation::all_gather ? parts_ : size_;
  for (int peer = 0; peer < fillers; ++peer)
    if (!has_filled(peer, ticket)) return false;
  return true;
}

// Whether the last chunk is measured, and not all of its readers are done.
bool StagedTask::waits_for_readers() {
  if (!stores_.await_readers()) return false;
  const Chunk at = chunk(filled_ - 1);
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && (job_.operation != Operation::gather || peer == job_.root) &&
        is_missing(peer, region_.of(peer).done, at.ticket + span_))
      return true;
  stores_.have_read(filled_ - 1, bytes(at.count));
  return false;
}

StoreTrials StagedTask::begin_stores(size_t call_bytes) {
  if (call_bytes <= kPlainBytes) return {};
  const bool one_way = is_one_way(job_.operation);
  const bool single = one_way && chunks_ == 1;  // uses what calls in both directions measured
  const bool measures = one_way ? fills() && !single : job_.operation != Operation::reduce;
  return {region_.store_tuner(call_bytes, one_way && !single), measures, one_way, chunks_};
}

// Runs a step of chunk `i`.
void StagedTask::work(uint64_t i, void (StagedTask::*step)(const Chunk&)) {
  nontemporal_ = stores_.nontemporal(i);
  stores_.run(i, step == &StagedTask::fill, [&] { (this->*step)(chunk(i)); });
}

// Orders the written data before the flags that follow.
void StagedTask::end_nontemporal() {
  if (std::exchange(nontemporal_, false)) nontemporal_fence();
}

// Copies from an array of this rank into its slot, for peers to read.
void StagedTask::copy_to_slot(std::byte* into, const std::byte* from, size_t bytes) {
  if (nontemporal_ && bytes >= kLeastStream)
    nontemporal_copy(into, from, bytes);
  else
    cpu::copy(into, from, bytes);
  region_.bytes_sent += bytes;
}

// Copies from another rank's slot into an array of this rank.
void StagedTask::copy_from_slot(std::byte* into, const std::byte* from, size_t bytes) {
  to_output_(into, from, bytes);
  region_.bytes_received += bytes;
}

void StagedTask::fill(const Chunk& at) {
  std::byte* into = slot(rank_, at.ticket);
  const size_t row_bytes = bytes(at.count);
  if (has_row_per_rank(job_.operation)) {
    for (int peer = 0; peer < parts_; ++peer)
      if (peer != rank_)
        copy_to_slot(into + static_cast<size_t>(peer) * row_bytes, row(peer, at), row_bytes);
  } else if (two_shots_) {
    for (int peer = 0; peer < size_; ++peer) {
      const collectives::Range part =
          collectives::piece(collectives::Space::input, at.count, size_, peer);
      if (peer != rank_)
        copy_to_slot(into + bytes(part.begin), row(0, at) + bytes(part.begin), bytes(part.count));
    }
  } else if (job_.operation == Operation::broadcast) {
    copy_to_slot(into, out_row(0, at), row_bytes);
  } else if (row_bytes > 0) {
    copy_to_slot(into, row(0, at), row_bytes);
  }
  end_nontemporal();
  // The fence of a wake-up waits until the flag has left this core. A tiny call looks for the
  // peers' flags meanwhile, and wakes them afterwards.
  wake_due_ = tiny_;
  publish_filled(at.ticket, !tiny_);
}

// into = the sum of the data at byte offset `at` in every other rank's slot and, for this rank, at
// `own`. `into` may be `own`. `again`: a second destination, for peers to read, or null.
struct StagedTask::Sum {
  std::byte* into;
  const std::byte* own;
  size_t at, count;
  std::byte* again = nullptr;
};

void StagedTask::reduce(const Chunk& at) {
  if (job_.operation == Operation::reduce_scatter) {
    const size_t place = static_cast<size_t>(rank_) * bytes(at.count);
    return combine({out_row(0, at), row(rank_, at), place, at.count}, at.ticket);
  }
  if (!two_shots_) return combine({out_row(0, at), row(0, at), 0, at.count}, at.ticket);
  const collectives::Range part =
      collectives::piece(collectives::Space::input, at.count, size_, rank_);
  const size_t place = bytes(part.begin);
  const std::byte* own = row(0, at) + place;
  std::byte* sums = slot_of_sums(rank_, at.ticket) + place;
  if (job_.operation == Operation::all_reduce || rank_ == job_.root)
    combine({out_row(0, at) + place, own, place, part.count, sums}, at.ticket);
  else
    combine({sums, own, place, part.count}, at.ticket);
  end_nontemporal();
  publish(region_.own().reduced[at.ticket % kSlots].flag, at.ticket + 1);
}

void StagedTask::combine(const Sum& to, uint64_t ticket) {
  region_.bytes_received += static_cast<uint64_t>(size_ - 1) * bytes(to.count);
  add_up(
      job_, size_, to.into, to.count,
      [&](int i) { return i == rank_ ? to.own : slot(i, ticket) + to.at; },
      [&](size_t offset, size_t n) {
        if (to.again != nullptr) copy_to_slot(to.again + offset, to.into + offset, n);
      });
}

void StagedTask::collect(const Chunk& at) {
  const size_t row_bytes = bytes(at.count);
  switch (job_.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      for (int peer = 0; peer < size_; ++peer) {
        const collectives::Range part =
            collectives::piece(collectives::Space::output, at.count, size_, peer);
        const size_t place = bytes(part.begin);
        if (peer != rank_)
          copy_from_slot(out_row(0, at) + place, slot_of_sums(peer, at.ticket) + place,
                         bytes(part.count));
      }
      return;
    case Operation::all_gather:
    case Operation::gather:
      for (int peer = 0; peer < parts_; ++peer)
        if (peer != rank_) copy_from_slot(out_row(peer, at), slot(peer, at.ticket), row_bytes);
      if (rank_ < parts_) to_output_(out_row(rank_, at), row(0, at), row_bytes);
      return;
    case Operation::all_to_all: {
      const size_t place = static_cast<size_t>(rank_) * row_bytes;
      for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_)
          copy_from_slot(out_row(peer, at), slot(peer, at.ticket) + place, row_bytes);
      to_output_(out_row(rank_, at), row(rank_, at), row_bytes);
      return;
    }
    case Operation::broadcast:
      if (rank_ != job_.root) copy_from_slot(out_row(0, at), slot(job_.root, at.ticket), row_bytes);
      return;
    case Operation::scatter:
      if (rank_ == job_.root) return to_output_(out_row(0, at), row(rank_, at), row_bytes);
      copy_from_slot(out_row(0, at),
                     slot(job_.root, at.ticket) + static_cast<size_t>(rank_) * row_bytes,
                     row_bytes);
      return;
    case Operation::reduce_scatter:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      return;
  }
}

}  // namespace pycomm::shared
