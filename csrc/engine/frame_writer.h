// Writes frames to a channel in pieces as they fit.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::engine {

class FrameWriter {
 public:
  explicit FrameWriter(transport::Channel& channel) : channel_(channel) {}

  // As the methods of Link.
  bool idle() const { return !open() && notices_.empty(); }
  void begin(const transport::Header& header, transport::ConstBytes payload, bool more);
  size_t push();
  void abandon();
  void post(transport::Header header, const std::string& text);
  bool flush();
  // What must still be sent when the link closes.
  std::vector<std::byte> unsent() const;

  uint64_t frames_sent() const { return frames_sent_; }
  uint64_t bytes_written() const { return bytes_written_; }

 private:
  struct Notice {
    transport::Header header;
    std::string text;
  };
  bool open() const { return head_left_ > 0 || !body_.empty(); }
  size_t write(transport::ConstBytes head, transport::ConstBytes body, bool more);

  transport::Channel& channel_;
  // The unsent rest of the current frame. The body is the caller's, or `abandoned_body_`.
  transport::Header out_{};
  size_t head_left_ = 0;
  transport::ConstBytes body_;
  std::vector<std::byte> abandoned_body_;
  bool abandoned_ = false, more_ = false;
  std::deque<Notice> notices_;
  size_t notice_sent_ = 0;  // bytes sent of the first notice
  uint64_t frames_sent_ = 0, bytes_written_ = 0;
};

}  // namespace pycomm::engine
