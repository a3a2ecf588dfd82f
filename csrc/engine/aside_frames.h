// Received frames that are buffered for a later reader, in order. The last one may still arrive.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::engine {

class AsideFrames {
 public:
  // A frame of whose payload so many bytes are left.
  void add(const transport::Header& header, size_t left) { frames_.push_back({header, left}); }
  // Bytes of the last frame that arrived.
  void append(transport::ConstBytes bytes) {
    std::vector<std::byte>& buffer = frames_.back().buffer;
    buffer.insert(buffer.end(), bytes.begin(), bytes.end());
  }

  // The reader is at the first frame from begin_read() to end_read() or drop().
  const transport::Header* begin_read() {
    read_ = !frames_.empty();
    return read_ ? &frames_.front().header : nullptr;
  }
  void end_read() { read_ = false; }
  bool is_read() const { return read_; }
  bool reads_last() const { return read_ && frames_.size() == 1; }
  size_t left() const { return frames_.front().left; }
  transport::ConstBytes peek() const {
    return transport::ConstBytes(frames_.front().buffer).subspan(frames_.front().taken);
  }
  void take(size_t bytes) {
    frames_.front().taken += bytes;
    frames_.front().left -= bytes;
  }
  size_t receive(transport::Bytes into) {
    const transport::ConstBytes here = peek();
    const size_t n = std::min(into.size(), here.size());
    std::copy_n(here.begin(), n, into.begin());
    take(n);
    return n;
  }
  void drop() {
    frames_.pop_front();
    read_ = false;
  }

 private:
  struct Frame {
    transport::Header header;
    size_t left;
    std::vector<std::byte> buffer{};
    size_t taken = 0;  // of the buffer
  };
  std::deque<Frame> frames_;
  bool read_ = false;
};

}  // namespace pycomm::engine
