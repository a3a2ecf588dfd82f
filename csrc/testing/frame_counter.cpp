// See frame_counter.h.
#include "testing/frame_counter.h"

#include <algorithm>
#include <cstring>

namespace pycomm::testing {

FrameCounter::Counted FrameCounter::count(transport::ConstBytes bytes, int operation,
                                          uint64_t& left) {
  for (size_t at = 0; at < bytes.size();) {
    const auto [n, counted] = step(bytes.subspan(at), operation);
    if (counted > 0 && counted >= left) {
      const auto over = std::min<uint64_t>(n, counted - left);
      left = 0;
      return {at + n - static_cast<size_t>(over), true};
    }
    left -= counted;
    at += n;
  }
  return {bytes.size(), false};
}

void FrameCounter::skip(transport::ConstBytes bytes) {
  while (!bytes.empty()) bytes = bytes.subspan(step(bytes, -1).first);
}

// Advances to the end of a header or of a payload: the bytes, and how many of them count.
std::pair<size_t, uint64_t> FrameCounter::step(transport::ConstBytes bytes, int operation) {
  size_t n = 0;
  const bool in_head = have_ < sizeof header_;
  if (in_head) {
    n = std::min(bytes.size(), sizeof header_ - have_);
    std::memcpy(reinterpret_cast<std::byte*>(&header_) + have_, bytes.data(), n);
    have_ += n;
    if (have_ == sizeof header_) payload_left_ = header_.bytes;
  } else {
    n = std::min<size_t>(bytes.size(), payload_left_);
    payload_left_ -= n;
  }
  const bool known = have_ == sizeof header_;
  const bool ours = known && header_.kind == transport::FrameKind::data &&
                    static_cast<int>(header_.operation) == operation;
  if (known && payload_left_ == 0) have_ = 0;
  if (operation < 0) return {n, n};
  return {n, !ours ? 0 : in_head ? sizeof header_ : n};
}

}  // namespace pycomm::testing
