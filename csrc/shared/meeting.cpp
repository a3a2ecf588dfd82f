#include "shared/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "os/process_memory.h"

namespace pycomm {
namespace {

// Below it slots cost nothing that could be saved.
constexpr size_t kLeastBytes = size_t{16} << 10;
// Below it the kernel's calls take longer than slots: to ask whether memory can be read takes 1 us.
constexpr size_t kLeastPulledBytes = size_t{256} << 10;

uint64_t address_of(const void* at) { return reinterpret_cast<uintptr_t>(at); }

}  // namespace

// Bytes of every rank's arrays that others work on; none at all: the operation always goes through
// slots.
struct Meeting::Needed {
  size_t input = 0, output = 0;

  static Needed of(const SharedJob& job, int size);
  size_t most() const { return std::max(input, output); }
};

Meeting::Needed Meeting::Needed::of(const SharedJob& job, int size) {
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

// What the line of the flag holds. Addresses are those of the rank's own process, and the last
// three are 1 or 0: no bool, as another rank wrote them.
struct Meeting::Offer {
  uint64_t input, output;
  uint64_t heap;             // where its heap begins
  uint64_t token_at, token;  // what who reads its process finds there
  int32_t process;
  uint8_t mapped;    // what others need lies in its heap
  uint8_t pullable;  // that can be read where it lies, and this rank may read all others
  uint8_t pulls;     // as it would have it
};

bool Meeting::is_held(const SharedJob& job, const Arena& arena) {
  return arena.has_heaps() && job.parts == 0 && Needed::of(job, arena.size()).most() > kLeastBytes;
}

Meeting::Meeting(Engine& engine, Arena& arena, const SharedJob& job, const Header& header,
                 bool prefers_pulled)
    : FlagTask(engine, arena, header, 1), job_(job), prefers_pulled_(prefers_pulled) {}

bool Meeting::advance() {
  awaited_ = kNoRank;
  if (!offered_) {
    if (!may_fill(first_)) return false;
    offer();
    return true;
  }
  for (int peer = 0; peer < size_; ++peer)
    if (!has_filled(peer, first_)) return false;
  heed_all();
  met_ = true;
  return true;
}

bool Meeting::are_readable(const Needed& needed) const {
  if (!is_readable(job_.input, needed.input)) return false;
  const bool in_place = job_.input == job_.output && needed.input == needed.output;
  return in_place || is_readable(job_.output, needed.output);
}

// An array that lies askew is not to be mapped: others would have to work on it.
void Meeting::offer() {
  static_assert(sizeof(Offer) <= kTinyBytes);
  const Needed needed = Needed::of(job_, size_);
  const auto is_mapped = [&](const std::byte* array, size_t bytes) {
    const auto offset = arena_.heap(rank_).offset_of(array, bytes);
    return bytes == 0 || (offset && *offset % job_.element_bytes == 0);
  };
  const bool mapped = is_mapped(job_.input, needed.input) && is_mapped(job_.output, needed.output);
  const Offer mine{
      .input = address_of(job_.input),
      .output = address_of(job_.output),
      .heap = address_of(arena_.heap(rank_).base.get()),
      .token_at = address_of(&arena_.token),
      .token = arena_.token,
      .process = getpid(),
      .mapped = mapped,
      .pullable = arena_.reaches == Arena::Reach::all && needed.most() >= kLeastPulledBytes &&
                  (mapped || are_readable(needed)),
      .pulls = prefers_pulled_,
  };
  std::memcpy(arena_.own().filled[first_ % kSlots].tiny.data(), &mine, sizeof mine);
  show_filled(first_);
  offered_ = true;
}

Meeting::Offer Meeting::offer_of(int peer) const {
  Offer offer;
  std::memcpy(&offer, arena_.of(peer).filled[first_ % kSlots].tiny.data(), sizeof offer);
  return offer;
}

Offered Meeting::place_of(int peer, const Offer& offer) const {
  Offered place{.input_at = offer.input, .output_at = offer.output, .process = offer.process};
  if (offer.mapped == 0) return place;
  const HeapView& heap = arena_.heap(peer);
  const auto at = [&](uint64_t address, size_t bytes) -> std::byte* {
    const uint64_t offset = address - offer.heap;
    if (bytes == 0) return nullptr;
    engine_.require_valid(arena_.member(peer),
                          heap.holds(offset, bytes) && offset % job_.element_bytes == 0,
                          "an offer of memory outside its heap");
    return heap.base.get() + offset;
  };
  const Needed needed = Needed::of(job_, size_);
  place.input = at(offer.input, needed.input);
  place.output = at(offer.output, needed.output);
  return place;
}

void Meeting::heed_all() {
  bool all_mapped = true;
  could_be_pulled_ = true;
  for (int peer = 0; peer < size_; ++peer) {
    const Offer offer = offer_of(peer);
    all_mapped &= offer.mapped != 0;
    could_be_pulled_ &= offer.pullable != 0;
    places_.push_back(place_of(peer, offer));
  }
  could_be_pulled_ &= !all_mapped;
  if (all_mapped)
    way_ = Way::mapped;
  else if (could_be_pulled_ && offer_of(0).pulls != 0)
    way_ = Way::pulled;
  if (arena_.reaches == Arena::Reach::unknown)
    arena_.reaches = reaches_all() ? Arena::Reach::all : Arena::Reach::not_all;
}

// The number of a process can be another's in another namespace: what is read must be its token.
bool Meeting::reaches_all() const {
  for (int peer = 0; peer < size_; ++peer) {
    const Offer offer = offer_of(peer);
    uint64_t found = 0;
    if (!read_process(offer.process, offer.token_at, reinterpret_cast<std::byte*>(&found),
                      sizeof found) ||
        found != offer.token)
      return false;
  }
  return true;
}

}  // namespace pycomm
