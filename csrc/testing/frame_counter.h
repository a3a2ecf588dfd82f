// Counts the bytes of a stream of frames that is passed in arbitrary pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::testing {

class FrameCounter {
 public:
  struct Counted {
    size_t bytes = 0;
    bool due = false;
  };

  bool is_between_frames() const { return have_ == 0; }
  // Subtracts the bytes that count from `left`; stops where that becomes 0: then they are due.
  // Those of data frames of `operation` count, or all if it is negative. A header counts when it is
  // complete, because it contains the operation.
  Counted count(transport::ConstBytes bytes, int operation, uint64_t& left);
  // As count(), but nothing counts.
  void skip(transport::ConstBytes bytes);

 private:
  std::pair<size_t, uint64_t> step(transport::ConstBytes bytes, int operation);

  transport::Header header_{};
  size_t have_ = 0, payload_left_ = 0;
};

}  // namespace pycomm::testing
