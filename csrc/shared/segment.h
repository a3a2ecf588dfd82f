// Shared memory of one rank for the other ranks of its host: a page of progress flags, and slots
// with data to read. Zeroed memory is a valid initial segment.
//
// Work is numbered by tickets: one per chunk of each call, the same numbers on all ranks, never
// reused. Ticket t uses slot t % kSlots of every segment. Only its owner writes a segment, except
// `sleeps`, `values_changed`, and sums in the slots: the previous rank's (staged_task.cpp).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/atomic_words.h"
#include "shared/flags.h"
#include "transport/frame.h"

namespace pycomm::shared {

inline constexpr size_t kSlots = 16;
// A chunk and its neighbours stay in a core's cache between write and read.
inline constexpr size_t kSlotBytes = size_t{64} << 10;
// Payload that fits into the cache line of the flag: the reader fetches one line.
inline constexpr size_t kTinyBytes = 48;

// Its version is the flag beside it.
using SharedHeader = AtomicWords<transport::Header>;

// A small value for the other ranks, by its key: group/parent_store.h. They read it at any time,
// also while another call runs, or after the group broke.
struct alignas(64) SharedValue {
  struct Content {
    uint64_t key_bytes, bytes;
    std::array<char, 2032> text;  // the key, then the value
  };
  std::atomic<uint64_t> hash;  // of the key; 0: the place is free
  Published<Content> content;
};
inline constexpr size_t kSharedValues = 8;

struct Segment {
  // If the flag is t + 1, all data of ticket t is visible.
  struct alignas(64) Filled {
    Flag<> flag;
    // Hash of the headers of this call and of all earlier ones in the epoch. If it differs, the
    // headers are compared.
    uint32_t signature;
    alignas(8) std::array<std::byte, kTinyBytes> tiny;
  };
  struct alignas(64) Reduced {
    Flag<> flag;
    SharedHeader header, before;  // for Filled: of this call and of the previous one
  };
  // The current call of the owner, whichever engine runs it.
  struct alignas(64) Begun {
    CurrentCall<transport::Header> call;
    std::atomic<int32_t> processor;  // on which the owner ran when it stored it, + 1; 0: unknown
  };

  std::array<Filled, kSlots> filled;
  std::array<Reduced, kSlots> reduced;
  Begun begun;
  alignas(64) Flag<> done;         // all lower tickets were read: their slots are free
  alignas(64) SleepFlag<> sleeps;  // wake the owner when a flag changes
  alignas(64) std::atomic<uint32_t> values_changed;  // counts values that others published
  std::array<SharedValue, kSharedValues> values;
  alignas(4096) std::array<std::array<std::byte, kSlotBytes>, kSlots> slots;
};

}  // namespace pycomm::shared
