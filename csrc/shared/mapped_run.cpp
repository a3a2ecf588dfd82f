#include "shared/mapped_run.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "collectives/plan.h"
#include "shared/sum.h"

namespace pycomm {
namespace {

// Below it slots cost nothing that could be saved.
constexpr size_t kLeastBytes = size_t{16} << 10;
// Between two looks at the world, which come every 1,024 steps: some 50 ms.
constexpr size_t kStepBytes = size_t{256} << 10;
constexpr uint64_t kPrivate = ~uint64_t{0};

// What the line of the flag holds: where the arrays begin in their rank's heap. 0 for one that
// nobody else works on.
struct Offer {
  uint64_t input = 0, output = 0;
};
static_assert(sizeof(Offer) <= kTinyBytes);

bool is_for_all(const Offer& offer) { return offer.input != kPrivate && offer.output != kPrivate; }

// Bytes that must be mapped of every rank's arrays; 0: it may be a private one.
struct Mapped {
  size_t input = 0, output = 0;
};

// None at all: the operation is not for arrays in heaps.
Mapped mapped_of(const SharedJob& job, int size) {
  const size_t bytes = job.count * job.element_bytes;
  switch (job.operation) {
    case Operation::all_reduce:
      return {bytes, bytes};
    case Operation::broadcast:
      return {.output = bytes};
    case Operation::all_gather:
      return {.input = bytes};
    case Operation::reduce_scatter:
      return {.input = bytes * static_cast<size_t>(size)};
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

bool has_pieces(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::broadcast;
}

}  // namespace

bool MappedRun::may_carry_out(const SharedJob& job, const Arena& arena) {
  const Mapped needed = mapped_of(job, arena.size());
  return arena.has_heaps() && job.parts == 0 && std::max(needed.input, needed.output) > kLeastBytes;
}

MappedRun::MappedRun(Engine& engine, Arena& arena, const SharedJob& job, const Header& header)
    : FlagTask(engine, arena, header, 1), job_(job), end_(job.count) {
  if (!has_pieces(job.operation)) return;
  const Range mine = piece(Space::output, job.count, size_, rank_);
  at_ = mine.begin;
  end_ = mine.begin + mine.count;
}

MappedRun::~MappedRun() {
  // Before it has met the others, too: they may have met meanwhile.
  if (offered_ && !refused_ && !ended_) arena_.leave();
}

bool MappedRun::advance() {
  awaited_ = kNobody;
  if (!offered_) {
    if (!may_fill(first_)) return false;
    offer();
    return true;
  }
  if (!met_) {
    for (int peer = 0; peer < size_; ++peer)
      if (!has_filled(peer, first_)) return false;
    places_.reserve(static_cast<size_t>(size_));
    for (int peer = 0; peer < size_ && !refused_; ++peer) heed(peer);
    met_ = true;
    return true;
  }
  if (at_ < end_) {
    if (!are_all_here()) return false;
    work_more();
    return true;
  }
  if (!told_) {
    if (!are_all_here()) return false;  // else what the last step has read may be anything
    publish(arena_.own().reduced[first_ % kSlots].flag, first_ + 1);
    told_ = true;
    return true;
  }
  if (!have_reduced(first_)) return false;
  publish(arena_.own().done, first_ + 1);
  ended_ = true;
  return true;
}

// Who has nothing to offer need not hear the others' offers. An array that lies askew is not
// offered: others would have to work on it.
void MappedRun::offer() {
  const auto place_of = [&](const std::byte* array, size_t bytes) -> uint64_t {
    if (bytes == 0) return 0;
    const auto offset = arena_.heap(rank_).offset_of(array, bytes);
    return offset && *offset % job_.element_bytes == 0 ? *offset : kPrivate;
  };
  const Mapped needed = mapped_of(job_, size_);
  const Offer offer{.input = place_of(job_.input, needed.input),
                    .output = place_of(job_.output, needed.output)};
  auto& line = arena_.own().filled[first_ % kSlots].tiny;
  std::memcpy(line.data(), &offer, sizeof offer);
  show_filled(first_);
  offered_ = true;
  refused_ = !is_for_all(offer);
}

void MappedRun::heed(int peer) {
  Offer offer;
  std::memcpy(&offer, arena_.of(peer).filled[first_ % kSlots].tiny.data(), sizeof offer);
  if (!is_for_all(offer)) {
    refused_ = true;
    return;
  }
  const HeapView& heap = arena_.heap(peer);
  const auto at = [&](uint64_t offset, size_t bytes) -> std::byte* {
    engine_.believe(arena_.member(peer),
                    heap.holds(offset, bytes) && offset % job_.element_bytes == 0,
                    "an offer of memory outside its heap");
    return bytes == 0 ? nullptr : heap.base.get() + offset;
  };
  const Mapped needed = mapped_of(job_, size_);
  places_.push_back({at(offer.input, needed.input), at(offer.output, needed.output)});
}

// Who has given up may use its array for something else by now; the engine hears why it did.
bool MappedRun::are_all_here() {
  for (int peer = 0; peer < size_; ++peer)
    if (!arena_.is_in(peer, header_)) {
      awaited_ = peer;
      return false;
    }
  return true;
}

void MappedRun::work_more() {
  const size_t element = job_.element_bytes;
  const size_t count = std::min(end_ - at_, kStepBytes / element);
  if (job_.operation == Operation::broadcast)
    spread(of(job_.root).output, at_ * element, count * element, job_.root);
  else if (job_.operation == Operation::all_gather)
    gather(at_ * element, count * element);
  else
    add_up_piece(at_ * element, count);
  at_ += count;
}

// Of all_reduce and reduce_scatter, whose row of the inputs is this rank's alone.
void MappedRun::add_up_piece(size_t begin, size_t count) {
  const bool for_all = job_.operation == Operation::all_reduce;
  const size_t row = for_all ? 0 : static_cast<size_t>(rank_) * job_.count * job_.element_bytes;
  add_up(
      job_, size_, job_.output + begin, count,
      [&](int rank) { return of(rank).input + row + begin; },
      [&](size_t offset, size_t bytes) {
        if (for_all) spread(job_.output, begin + offset, bytes, rank_);
      });
  arena_.bytes_received += static_cast<uint64_t>(size_ - 1) * count * job_.element_bytes;
}

// From the array of `owner` at `from` into the outputs of all others.
void MappedRun::spread(const std::byte* from, size_t begin, size_t bytes, int owner) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == owner) continue;
    std::memcpy(of(peer).output + begin, from + begin, bytes);
    if (peer != rank_) arena_.bytes_sent += bytes;
  }
  if (owner != rank_) arena_.bytes_received += bytes;
}

void MappedRun::gather(size_t begin, size_t bytes) {
  for (int peer = 0; peer < size_; ++peer) {
    const size_t row = static_cast<size_t>(peer) * job_.count * job_.element_bytes;
    std::byte* const into = job_.output + row + begin;
    if (const std::byte* from = of(peer).input + begin; into != from)
      std::memcpy(into, from, bytes);
    if (peer != rank_) arena_.bytes_received += bytes;
  }
}

}  // namespace pycomm
