// The positions of a ring buffer in shared memory, with one writer and one reader. ring_channel.h
// moves the bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/atomics.h"
#include "core/sleep_flag.h"

namespace pycomm::transport {

// The first page of a ring. Positions count all bytes since the start and never wrap. Zeroed memory
// is a valid initial ring.
template <typename Atomics = StdAtomics>
struct RingHead {
  template <typename T>
  using Atomic = typename Atomics::template Atomic<T>;

  alignas(64) Atomic<uint64_t> written;
  alignas(64) Atomic<uint64_t> read;
  alignas(64) SleepFlag<Atomics> reader_sleeps;
  alignas(64) SleepFlag<Atomics> writer_sleeps;
  Atomic<int32_t> writer_processor;  // on which the writer ran when it stored it, + 1
};

// Both ends keep their own position; the copy in the head is for the peer.
template <typename Atomics = StdAtomics>
class RingWriter {
 public:
  RingWriter(RingHead<Atomics>& head, size_t bytes) : head_(head), bytes_(bytes) {}

  uint64_t position() const { return written_; }
  // Free bytes at position(). Loads the peer's position only if the known one leaves no space.
  size_t space() {
    (void)has_space(1);
    return bytes_ - (written_ - read_);
  }
  bool has_space(size_t n) {
    if (bytes_ - (written_ - read_) < n)
      read_ = head_.read.load(std::memory_order_acquire);  // its reads end before we overwrite
    return bytes_ - (written_ - read_) >= n;
  }
  // Publishes `n` more bytes. True: wake the reader. Sequentially consistent, for claim(); release
  // order is part of it: the bytes are stored before.
  bool publish(size_t n) {
    written_ += n;
    head_.written.store(written_);
    return head_.reader_sleeps.claim();
  }
  // Call space() before the sleep.
  void arm() { head_.writer_sleeps.arm(); }
  void disarm() { head_.writer_sleeps.disarm(); }

 private:
  RingHead<Atomics>& head_;
  size_t bytes_;
  uint64_t written_ = 0;
  uint64_t read_ = 0;  // the peer's position when last loaded
};

template <typename Atomics = StdAtomics>
class RingReader {
 public:
  explicit RingReader(RingHead<Atomics>& head) : head_(head) {}

  uint64_t position() const { return read_; }
  // Bytes at position(); more than the ring has if the peer stored an invalid position.
  uint64_t available() const {
    return head_.written.load(std::memory_order_acquire) - read_;  // then the bytes are valid
  }
  // Releases `n` bytes. True: wake the writer. The order is that of publish(): the reads of the
  // bytes end before.
  bool take(size_t n) {
    read_ += n;
    head_.read.store(read_);
    return head_.writer_sleeps.claim();
  }
  // Call available() before the sleep.
  void arm() { head_.reader_sleeps.arm(); }
  void disarm() { head_.reader_sleeps.disarm(); }

 private:
  RingHead<Atomics>& head_;
  uint64_t read_ = 0;
};

}  // namespace pycomm::transport
