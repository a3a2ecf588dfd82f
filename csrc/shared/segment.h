// What one rank lays out for the other ranks of its host: a page that says how far it is, and slots
// that hold what they are to read. Zeroed memory is a segment at its beginning.
//
// Work is counted in tickets: one for each chunk of each call, the same numbers on all ranks, and
// never one twice. Ticket t uses slot t % kSlots of every segment. Only its owner writes a segment,
// except `sleeps`.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "transport/frame.h"

namespace pycomm {

inline constexpr size_t kSlots = 16;
// A chunk and its neighbours stay in a core's cache between being written and being read.
inline constexpr size_t kSlotBytes = size_t{64} << 10;
// What fits into the cache line of the flag itself: the reader fetches one line.
inline constexpr size_t kTinyBytes = 48;

// A header that another rank may read while it is written: a reader looks at the flag beside it
// before and after. Release and acquire keep both looks in their places.
class SharedHeader {
 public:
  void store(const Header& header) {
    const auto words = std::bit_cast<std::array<uint64_t, 4>>(header);
    for (size_t i = 0; i < words.size(); ++i) words_[i].store(words[i], std::memory_order_release);
  }
  Header load() const {
    std::array<uint64_t, 4> words;
    for (size_t i = 0; i < words.size(); ++i) words[i] = words_[i].load(std::memory_order_acquire);
    return std::bit_cast<Header>(words);
  }

 private:
  std::array<std::atomic<uint64_t>, 4> words_;
};

struct Segment {
  // Behind a flag that is t + 1 everything of ticket t is there: the flag is stored last, with
  // release, and loaded first, with acquire.
  struct alignas(64) Filled {
    std::atomic<uint64_t> flag;
    // Of the headers of this call and of all before it in the epoch. Where it differs the headers
    // are looked at.
    uint32_t signature;
    alignas(8) std::array<std::byte, kTinyBytes> tiny;
  };
  struct alignas(64) Reduced {
    std::atomic<uint64_t> flag;
    SharedHeader header, before;  // belong to Filled: this call's, and that of the one before it
  };
  // The call that the owner is in, whatever carries it out.
  struct alignas(64) Begun {
    std::atomic<uint64_t> call;  // number_of() its header; stored last
    SharedHeader header;
  };

  std::array<Filled, kSlots> filled;
  std::array<Reduced, kSlots> reduced;
  Begun begun;
  alignas(64) std::atomic<uint64_t> done;    // tickets below it are read: their slots are free
  alignas(64) std::atomic<uint32_t> sleeps;  // 1: ring for it when something above changes
  alignas(4096) std::array<std::array<std::byte, kSlotBytes>, kSlots> slots;
};

}  // namespace pycomm
