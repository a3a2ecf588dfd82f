// Reads frames from a channel in pieces as they arrive.
#pragma once

#include <optional>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::engine {

class FrameReader {
 public:
  explicit FrameReader(transport::Channel& channel) : channel_(channel) {}

  // As the methods of Link.
  const transport::Header* front();
  bool has_front() const { return whole_ && !discarding_; }
  size_t payload_left() const { return payload_left_; }
  transport::ConstBytes peek() { return channel_.peek(payload_left_); }
  void take(size_t bytes);
  size_t receive(transport::Bytes into);
  void finish();
  void discard();
  std::optional<transport::ConstBytes> behind_front(transport::FrameKind kind);

  uint64_t bytes_received() const { return bytes_received_; }

 private:
  bool read_header();
  bool drop();

  transport::Channel& channel_;
  // The frame at the front.
  transport::Header in_{};
  size_t head_have_ = 0, payload_left_ = 0;
  bool whole_ = false, discarding_ = false;
  uint64_t bytes_received_ = 0;
};

}  // namespace pycomm::engine
