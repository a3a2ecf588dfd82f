// See delayed_buffer.h.
#include "testing/delayed_buffer.h"

#include <algorithm>

namespace pycomm::testing {
namespace {

constexpr size_t kMostBytes = size_t{256} << 10;
constexpr size_t kSpaceBytes = size_t{64} << 10;

}  // namespace

bool DelayedBuffer::is_full() const { return end_ - begin_ >= kMostBytes; }

transport::Bytes DelayedBuffer::free_space() {
  if (begin_ >= kSpaceBytes || begin_ == end_) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(begin_));
    end_ -= begin_;
    begin_ = 0;
  }
  bytes_.resize(end_ + kSpaceBytes);
  return transport::Bytes(bytes_).subspan(end_);
}

void DelayedBuffer::add(size_t bytes, std::optional<std::chrono::nanoseconds> delay) {
  if (bytes == 0) return;
  end_ += bytes;
  if (delay) {
    delayed_.push_back({bytes, Clock::now() + *delay});
  } else {
    delayed_.clear();
    due_ = end_ - begin_;
  }
}

void DelayedBuffer::reveal(size_t chunk_bytes) {
  while (!delayed_.empty() && delayed_.front().at <= Clock::now()) {
    due_ += delayed_.front().bytes;
    delayed_.pop_front();
  }
  shown_ += std::min(due_ - shown_, chunk_bytes);
}

std::chrono::nanoseconds DelayedBuffer::until_next() const {
  const std::chrono::nanoseconds shortest{1};
  if (shown_ < due_) return shortest;
  return std::max<std::chrono::nanoseconds>(shortest, delayed_.front().at - Clock::now());
}

transport::ConstBytes DelayedBuffer::visible(size_t want) const {
  return {bytes_.data() + begin_, std::min(want, shown_)};
}

void DelayedBuffer::take(size_t bytes) {
  begin_ += bytes;
  shown_ -= bytes;
  due_ -= bytes;
}

}  // namespace pycomm::testing
