// Received bytes that become visible later than they arrived, in their order.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include "core/deadline.h"
#include "transport/transport.h"

namespace pycomm::testing {

class DelayedBuffer {
 public:
  bool is_full() const;
  // Space for the bytes that arrive next. Valid until the next call.
  transport::Bytes free_space();
  // The first bytes of free_space() have arrived and become visible after `delay`. Without a delay,
  // they become visible now, with all that arrived before.
  void add(size_t bytes, std::optional<std::chrono::nanoseconds> delay);

  // Makes at most `chunk_bytes` more bytes visible, of those whose delay is over.
  void reveal(size_t chunk_bytes);
  // Whether bytes will become visible, and the time until reveal() has an effect.
  bool is_pending() const { return shown_ < due_ || !delayed_.empty(); }
  std::chrono::nanoseconds until_next() const;

  // The visible bytes that were not taken, at most `want`. Valid until the next call.
  transport::ConstBytes visible(size_t want) const;
  void take(size_t bytes);

 private:
  struct Delayed {
    size_t bytes;
    Clock::time_point at;
  };

  std::vector<std::byte> bytes_;
  size_t begin_ = 0, end_ = 0;  // what arrived and was not taken
  size_t due_ = 0;              // from `begin_` on: their delay is over
  size_t shown_ = 0;            // from `begin_` on: visible
  std::deque<Delayed> delayed_;
};

}  // namespace pycomm::testing
