#include "shared/shared_run.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "collectives/plan.h"
#include "shared/stream.h"

namespace pycomm {
namespace {

// Up to this every rank reduces everything: one exchange of flags instead of two. Measured on two
// processors of a shared virtual machine (EPYC): the two are equal between 8 and 32 KiB.
constexpr size_t kOneShotBytes = size_t{16} << 10;
// Chunks that a rank fills ahead of those that it collects.
constexpr uint64_t kAhead = 8;
// What combine() works on at a time: with all its summands it stays in the first cache.
constexpr size_t kBlockBytes = size_t{8} << 10;
// Shorter runs are in the other's way to it before they are out of ours.
constexpr size_t kLeastStream = size_t{2} << 10;
// Of so many chunks as many are a trial, half of them in the slower way.
constexpr uint64_t kTrialPeriod = 2048, kTrialChunks = 16;

uint32_t signature_of(const Header& header, uint32_t before) {
  uint64_t hash = 0xcbf29ce484222325 ^ before;
  for (const uint64_t word : std::bit_cast<std::array<uint64_t, 4>>(header)) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return static_cast<uint32_t>(hash);
}

// Rows of `count` elements that a slot holds side by side, one for each reader.
bool has_row_per_rank(Operation operation) {
  return operation == Operation::reduce_scatter || operation == Operation::scatter ||
         operation == Operation::all_to_all;
}

void copy_bytes(std::byte* into, const std::byte* from, size_t bytes) {
  if (bytes > 0 && into != from) std::memmove(into, from, bytes);
}

}  // namespace

bool is_shared(Operation operation) {
  return operation != Operation::send && operation != Operation::recv;
}

SharedRun::SharedRun(Engine& engine, Arena& arena, const SharedJob& job, const Header& header)
    : engine_(engine),
      arena_(arena),
      job_(job),
      header_(header),
      rank_(arena.rank()),
      size_(arena.size()),
      parts_(job.parts == 0 ? size_ : job.parts) {
  const size_t rows = has_row_per_rank(job.operation) ? static_cast<size_t>(parts_) : 1;
  const size_t whole = bytes(job.count) * rows;
  tiny_ = whole <= kTinyBytes;
  const bool sums = job.operation == Operation::all_reduce || job.operation == Operation::reduce;
  two_shots_ = sums && whole > kOneShotBytes;
  chunk_count_ = std::max<size_t>(1, kSlotBytes / job.element_bytes / rows);
  chunks_ = std::max<uint64_t>(1, (job.count + chunk_count_ - 1) / chunk_count_);
  begin_stores(whole);
  if (arena.enter(header.epoch)) publish(arena.own().done, arena.base());
  first_ = arena.take(chunks_);
  before_ = std::exchange(arena.last, header);
  signature_ = arena.signature = signature_of(header, arena.signature);
}

SharedRun::Chunk SharedRun::chunk(uint64_t i) const {
  const size_t begin = i * chunk_count_;
  return {first_ + i, begin, std::min(chunk_count_, job_.count - begin)};
}

std::byte* SharedRun::slot(int rank, uint64_t ticket) const {
  Segment& segment = arena_.of(rank);
  return tiny_ ? segment.filled[ticket % kSlots].tiny.data()
               : segment.slots[ticket % kSlots].data();
}

const std::byte* SharedRun::row(int i, const Chunk& chunk) const {
  return job_.input + bytes(static_cast<size_t>(i) * job_.count + chunk.begin);
}

std::byte* SharedRun::out_row(int i, const Chunk& chunk) const {
  return job_.output + bytes(static_cast<size_t>(i) * job_.count + chunk.begin);
}

bool SharedRun::fills() const {
  const bool one_way =
      job_.operation == Operation::broadcast || job_.operation == Operation::scatter;
  if (job_.operation == Operation::all_gather) return rank_ < parts_;
  return !one_way || rank_ == job_.root;
}

bool SharedRun::reduces() const {
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

bool SharedRun::collects() const {
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

// What others wait for comes first, and what is still in the caches.
bool SharedRun::advance() {
  awaited_ = kNobody;
  if (collected_ < reduced_) {
    const Chunk at = chunk(collected_);
    if (!collects() || (two_shots_ ? have_reduced(at.ticket) : have_filled(at.ticket))) {
      if (collects()) work(collected_, &SharedRun::collect);
      if (stores_ != nullptr) end_trial(collected_);
      ++collected_;
      publish(arena_.own().done, at.ticket + 1);
      return true;
    }
  }
  if (reduced_ < filled_) {
    const Chunk at = chunk(reduced_);
    if (!reduces() || have_filled(at.ticket)) {
      if (reduces()) work(reduced_, &SharedRun::reduce);
      ++reduced_;
      return true;
    }
  }
  if (filled_ < chunks_ && filled_ < collected_ + kAhead) {
    const Chunk at = chunk(filled_);
    if (!fills() || may_fill(at.ticket)) {
      if (fills()) work(filled_, &SharedRun::fill);
      ++filled_;
      return true;
    }
  }
  return false;
}

// Whether a flag of `peer` has yet to come to `need`: then that is what this rank waits for.
bool SharedRun::lacks(int peer, const std::atomic<uint64_t>& flag, uint64_t need) {
  if (flag.load(std::memory_order_acquire) >= need) return false;
  awaited_ = peer;
  awaited_flag_ = &flag;
  awaited_value_ = need;
  return true;
}

// A slot is free when everybody has read what was in it. The flag is looked at once in many
// tickets, as a look takes it out of its owner's cache.
bool SharedRun::may_fill(uint64_t ticket) {
  const uint64_t need = std::max(arena_.base(), ticket < kSlots ? 0 : ticket + 1 - kSlots);
  for (int peer = 0; peer < size_; ++peer) {
    uint64_t& known = arena_.known_done(peer);
    if (peer == rank_ || known >= need) continue;
    const auto& done = arena_.of(peer).done;
    if (lacks(peer, done, need)) return false;
    known = done.load(std::memory_order_acquire);
  }
  return true;
}

bool SharedRun::has_filled(int peer, uint64_t ticket) {
  if (peer == rank_) return true;
  const auto& filled = arena_.of(peer).filled[ticket % kSlots];
  if (lacks(peer, filled.flag, ticket + 1)) return false;
  if (filled.signature != signature_) disagree(peer, ticket);
  return true;
}

// A call in which data flows one way can be over where nobody has heard of the others: then it is
// the next one that shows it.
void SharedRun::disagree(int peer, uint64_t ticket) {
  const auto& theirs = arena_.of(peer).reduced[ticket % kSlots];
  const Header header = theirs.header.load(), before = theirs.before.load();
  const int member = arena_.member(peer);
  if (!same_call(header, header_)) engine_.disagree(member, header);
  const std::string other = same_call(before, before_)
                                ? std::string("not the last one")
                                : "this rank called " + describe(before_) + ", rank " +
                                      std::to_string(member) + " called " + describe(before);
  engine_.give_up_call(member, before_.sequence,
                       "ranks disagree about a call before " + describe(header_) + ": " + other +
                           "; what it writes is undefined");
}

bool SharedRun::have_filled(uint64_t ticket) {
  const bool one_way =
      job_.operation == Operation::broadcast || job_.operation == Operation::scatter;
  if (one_way) return has_filled(job_.root, ticket);
  const int fillers = job_.operation == Operation::all_gather ? parts_ : size_;
  for (int peer = 0; peer < fillers; ++peer)
    if (!has_filled(peer, ticket)) return false;
  return true;
}

bool SharedRun::have_reduced(uint64_t ticket) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && lacks(peer, arena_.of(peer).reduced[ticket % kSlots].flag, ticket + 1))
      return false;
  return true;
}

// Only where every rank both writes and reads can it tell by itself which way is faster; the other
// verbs take what those have found.
void SharedRun::begin_stores(size_t call_bytes) {
  if (call_bytes <= kOneShotBytes) return;
  learned_ = arena_.stores(call_bytes).streams;
  switch (job_.operation) {
    case Operation::all_reduce:
    case Operation::all_gather:
    case Operation::reduce_scatter:
    case Operation::all_to_all:
      break;
    case Operation::reduce:
    case Operation::broadcast:
    case Operation::gather:
    case Operation::scatter:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      return;
  }
  stores_ = &arena_.stores(call_bytes);
  counted_ = std::exchange(stores_->chunks, stores_->chunks + chunks_);
}

// Does a step of chunk `i`. In a trial the ways change in an order without a period, as calls may
// have one.
void SharedRun::work(uint64_t i, void (SharedRun::*step)(const Chunk&)) {
  streaming_ = learned_;
  if (stores_ == nullptr) return (this->*step)(chunk(i));
  const uint64_t turn = (counted_ + i) % kTrialPeriod;
  if (turn >= kTrialChunks) return (this->*step)(chunk(i));
  streaming_ = std::popcount(turn) % 2 == 1;
  const auto start = Clock::now();
  (this->*step)(chunk(i));
  spent_[i % kSlots] += Clock::now() - start;
}

// Chunk `i` is over. The least time of each way counts: nothing makes a chunk take too little.
void SharedRun::end_trial(uint64_t i) {
  const uint64_t turn = (counted_ + i) % kTrialPeriod;
  if (turn >= kTrialChunks) return;
  auto& least = stores_->least;
  if (turn == 0) least.fill(std::numeric_limits<double>::infinity());
  const auto spent = std::exchange(spent_[i % kSlots], {});
  double& way = least[static_cast<size_t>(std::popcount(turn) % 2)];
  way = std::min(way, std::chrono::duration<double, std::nano>(spent).count() /
                          static_cast<double>(bytes(chunk(i).count)));
  if (turn == kTrialChunks - 1) learned_ = stores_->streams = least[1] < least[0];
}

// From an array of ours into a slot, for others to read.
void SharedRun::lay_out(std::byte* into, const std::byte* from, size_t bytes) {
  if (streaming_ && bytes >= kLeastStream)
    stream(into, from, bytes);
  else
    copy_bytes(into, from, bytes);
  arena_.bytes_sent += bytes;
}

// From another rank's slot into an array of ours.
void SharedRun::take(std::byte* into, const std::byte* from, size_t bytes) {
  copy_bytes(into, from, bytes);
  arena_.bytes_received += bytes;
}

void SharedRun::fill(const Chunk& at) {
  Segment& own = arena_.own();
  std::byte* into = slot(rank_, at.ticket);
  const size_t row_bytes = bytes(at.count);
  if (has_row_per_rank(job_.operation)) {
    for (int peer = 0; peer < parts_; ++peer)
      if (peer != rank_)
        lay_out(into + static_cast<size_t>(peer) * row_bytes, row(peer, at), row_bytes);
  } else if (two_shots_) {
    for (int peer = 0; peer < size_; ++peer) {
      const Range part = piece(Space::input, at.count, size_, peer);
      if (peer != rank_)
        lay_out(into + bytes(part.begin), row(0, at) + bytes(part.begin), bytes(part.count));
    }
  } else if (job_.operation == Operation::broadcast) {
    lay_out(into, out_row(0, at), row_bytes);
  } else if (row_bytes > 0) {
    lay_out(into, row(0, at), row_bytes);
  }
  auto& filled = own.filled[at.ticket % kSlots];
  filled.signature = signature_;
  own.reduced[at.ticket % kSlots].header.store(header_);
  own.reduced[at.ticket % kSlots].before.store(before_);
  publish(filled.flag, at.ticket + 1);
}

// into = the sum of what lies `at` bytes from the beginning of every other rank's slot and, for
// this rank, at `own`; `into` may be `own`. `again`: where it is laid out for others, or null.
struct SharedRun::Sum {
  std::byte* into;
  const std::byte* own;
  size_t at, count;
  std::byte* again = nullptr;
};

void SharedRun::reduce(const Chunk& at) {
  std::byte* mine = slot(rank_, at.ticket);
  if (job_.operation == Operation::reduce_scatter) {
    const size_t place = static_cast<size_t>(rank_) * bytes(at.count);
    return combine({out_row(0, at), row(rank_, at), place, at.count}, at.ticket);
  }
  if (!two_shots_) return combine({out_row(0, at), mine, 0, at.count}, at.ticket);
  const Range part = piece(Space::input, at.count, size_, rank_);
  const size_t place = bytes(part.begin);
  const std::byte* own = row(0, at) + place;
  if (job_.operation == Operation::all_reduce || rank_ == job_.root)
    combine({out_row(0, at) + place, own, place, part.count, mine + place}, at.ticket);
  else
    combine({mine + place, own, place, part.count}, at.ticket);
  publish(arena_.own().reduced[at.ticket % kSlots].flag, at.ticket + 1);
}

// In rank order, block by block.
void SharedRun::combine(const Sum& to, uint64_t ticket) {
  const size_t element = job_.element_bytes, size = static_cast<size_t>(size_);
  arena_.bytes_received += (size - 1) * bytes(to.count);
  alignas(64) std::array<std::byte, kBlockBytes> sum;
  const size_t block = job_.folds ? kBlockBytes / element / size : kBlockBytes / element;
  for (size_t begin = 0; begin < to.count; begin += block) {
    const size_t n = std::min(block, to.count - begin), offset = begin * element;
    const auto summand = [&](int i) {
      return i == rank_ ? to.own + offset : slot(i, ticket) + to.at + offset;
    };
    if (job_.folds) {
      for (int i = 0; i < size_; ++i)
        std::memcpy(sum.data() + static_cast<size_t>(i) * n * element, summand(i), n * element);
      job_.reducer->fold(to.into + offset, sum.data(), n, size_);
    } else {
      const std::byte* so_far = summand(0);
      for (int i = 1; i < size_ - 1; ++i) {
        job_.reducer->reduce(sum.data(), so_far, summand(i), n);
        so_far = sum.data();
      }
      if (job_.finishes)
        job_.reducer->finish(to.into + offset, so_far, summand(size_ - 1), n, size_);
      else
        job_.reducer->reduce(to.into + offset, so_far, summand(size_ - 1), n);
    }
    if (to.again != nullptr) lay_out(to.again + offset, to.into + offset, n * element);
  }
}

void SharedRun::collect(const Chunk& at) {
  const size_t row_bytes = bytes(at.count);
  switch (job_.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      for (int peer = 0; peer < size_; ++peer) {
        const Range part = piece(Space::output, at.count, size_, peer);
        const size_t place = bytes(part.begin);
        if (peer != rank_)
          take(out_row(0, at) + place, slot(peer, at.ticket) + place, bytes(part.count));
      }
      return;
    case Operation::all_gather:
    case Operation::gather:
      for (int peer = 0; peer < parts_; ++peer)
        if (peer != rank_) take(out_row(peer, at), slot(peer, at.ticket), row_bytes);
      if (rank_ < parts_) copy_bytes(out_row(rank_, at), row(0, at), row_bytes);
      return;
    case Operation::all_to_all: {
      const size_t place = static_cast<size_t>(rank_) * row_bytes;
      for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_) take(out_row(peer, at), slot(peer, at.ticket) + place, row_bytes);
      copy_bytes(out_row(rank_, at), row(rank_, at), row_bytes);
      return;
    }
    case Operation::broadcast:
      if (rank_ != job_.root) take(out_row(0, at), slot(job_.root, at.ticket), row_bytes);
      return;
    case Operation::scatter:
      if (rank_ == job_.root) return copy_bytes(out_row(0, at), row(rank_, at), row_bytes);
      take(out_row(0, at), slot(job_.root, at.ticket) + static_cast<size_t>(rank_) * row_bytes,
           row_bytes);
      return;
    case Operation::reduce_scatter:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      return;
  }
}

// Sleeping and waking cross as in a ring: the sleeper stores `sleeps` and then looks at the flags,
// we store a flag and then look at `sleeps`; all four are sequentially consistent.
void SharedRun::publish(std::atomic<uint64_t>& flag, uint64_t value) {
  if (std::exchange(streaming_, false)) end_stream();
  flag.store(value);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto& sleeps = arena_.of(peer).sleeps;
    if (sleeps.load() != 0 && sleeps.exchange(0) != 0) engine_.ring(arena_.member(peer));
  }
}

void SharedRun::arm() {
  arena_.own().sleeps.store(1);
  Header theirs;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && arena_.differs(peer, header_, theirs))
      engine_.disagree(arena_.member(peer), theirs);
  // Whoever is in a later call has done what it does in this one: what is not there will not come.
  if (awaited_ != kNobody && arena_.is_past(awaited_, header_, theirs) &&
      awaited_flag_->load(std::memory_order_acquire) < awaited_value_)
    engine_.disagree_on_end(arena_.member(awaited_), theirs);
}

int SharedRun::receiving_from() const {
  return awaited_ == kNobody ? kNobody : arena_.member(awaited_);
}

void SharedRun::disarm() { arena_.own().sleeps.store(0); }

}  // namespace pycomm
