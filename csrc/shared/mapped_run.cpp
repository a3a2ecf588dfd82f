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

// What the line of the flag holds: where the arrays begin in their rank's heap.
struct Offer {
  uint64_t input = kPrivate, output = kPrivate;
};
static_assert(sizeof(Offer) <= kTinyBytes);

}  // namespace

bool MappedRun::may_carry_out(const SharedJob& job, const Arena& arena) {
  return job.operation == Operation::all_reduce && arena.has_heaps() &&
         job.count * job.element_bytes > kLeastBytes;
}

MappedRun::MappedRun(Engine& engine, Arena& arena, const SharedJob& job, const Header& header)
    : FlagTask(engine, arena, header, 1), job_(job) {
  const Range mine = piece(Space::output, job.count, size_, rank_);
  at_ = mine.begin;
  end_ = mine.begin + mine.count;
}

MappedRun::~MappedRun() {
  if (met_ && !refused_ && !ended_) arena_.leave();
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
    add_up_more();
    return true;
  }
  if (!told_) {
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
  const auto place_of = [&](const std::byte* array) {
    const auto offset = arena_.heap(rank_).offset_of(array, job_.count * job_.element_bytes);
    return offset && *offset % job_.element_bytes == 0 ? *offset : kPrivate;
  };
  const Offer offer{.input = place_of(job_.input), .output = place_of(job_.output)};
  auto& line = arena_.own().filled[first_ % kSlots].tiny;
  std::memcpy(line.data(), &offer, sizeof offer);
  show_filled(first_);
  offered_ = true;
  refused_ = offer.input == kPrivate || offer.output == kPrivate;
}

void MappedRun::heed(int peer) {
  Offer offer;
  std::memcpy(&offer, arena_.of(peer).filled[first_ % kSlots].tiny.data(), sizeof offer);
  if (offer.input == kPrivate || offer.output == kPrivate) {
    refused_ = true;
    return;
  }
  const HeapView& heap = arena_.heap(peer);
  const size_t bytes = job_.count * job_.element_bytes;
  for (const uint64_t offset : {offer.input, offer.output})
    check(heap.holds(offset, bytes) && offset % job_.element_bytes == 0,
          "rank " + std::to_string(arena_.member(peer)) + " offers memory outside its heap");
  places_.push_back({heap.base.get() + offer.input, heap.base.get() + offer.output});
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

void MappedRun::add_up_more() {
  const size_t element = job_.element_bytes, begin = at_ * element;
  const size_t count = std::min(end_ - at_, kStepBytes / element);
  std::byte* mine = places_[static_cast<size_t>(rank_)].output + begin;
  add_up(
      job_, size_, mine, count,
      [&](int rank) { return places_[static_cast<size_t>(rank)].input + begin; },
      [&](size_t offset, size_t bytes) {
        for (int peer = 0; peer < size_; ++peer)
          if (peer != rank_)
            std::memcpy(places_[static_cast<size_t>(peer)].output + begin + offset, mine + offset,
                        bytes);
      });
  at_ += count;
  const uint64_t moved = static_cast<uint64_t>(size_ - 1) * count * element;
  arena_.bytes_sent += moved;
  arena_.bytes_received += moved;
}

}  // namespace pycomm
