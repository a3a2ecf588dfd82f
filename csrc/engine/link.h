// Frames over a channel: a header and its payload, sent and received in pieces as they fit.
//
// A link also keeps the stream valid when a call fails. A frame that was begun is still sent
// completely, with its true bytes, because its receiver may use them. A partly received frame is
// discarded. Notices are sent between frames.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm {

class Link {
 public:
  explicit Link(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}

  // Sending. begin() may be called once idle(); its payload must stay valid until the frame is sent
  // or abandoned. push() sends what fits now and returns the payload bytes sent.
  bool idle() const { return !open() && notices_.empty(); }
  // `more`: another frame follows immediately.
  void begin(const Header& header, ConstBytes payload, bool more = false);
  size_t push();
  // Releases the payload of the current frame: copies its unsent rest, for flush().
  void abandon();
  // Queues a notice, a frame with a short text, behind what is being sent.
  void post(Header header, const std::string& text);
  // Sends the rest of an abandoned frame, and notices. True when nothing is left.
  bool flush();
  // Closes this side; the channel delivers the unsent bytes.
  void close() noexcept;

  // Receiving. front() is the header of the frame at the front, or null until it has arrived
  // completely. Take the payload in pieces, then call finish() to get to the next frame. Throws
  // PeerLost if the bytes are not a valid header.
  const Header* front();
  bool has_front() const { return whole_ && !discarding_; }
  size_t payload_left() const { return payload_left_; }
  ConstBytes peek();
  void take(size_t bytes);
  size_t receive(Bytes into);
  void finish();
  // Discards the frame at the front, including the part that has not arrived yet.
  void discard();
  // Looks behind the frame at the front for the next frame of this kind, without taking anything:
  // the part of its payload that has arrived; null if no such frame has arrived.
  std::optional<ConstBytes> behind_front(FrameKind kind);

  Channel& channel() { return *channel_; }
  uint64_t frames_sent() const { return frames_sent_; }
  uint64_t bytes_written() const { return bytes_written_; }
  uint64_t bytes_received() const { return bytes_received_; }

 private:
  struct Notice {
    Header header;
    std::string text;
  };
  std::vector<std::byte> unsent() const;
  bool open() const { return head_left_ > 0 || !body_.empty(); }
  size_t write(ConstBytes head, ConstBytes body, bool more);
  bool read_header();
  bool drop();

  std::unique_ptr<Channel> channel_;
  // Sending: the unsent rest of the current frame. The body is the caller's, or `abandoned_body_`.
  Header out_{};
  size_t head_left_ = 0;
  ConstBytes body_;
  std::vector<std::byte> abandoned_body_;
  bool abandoned_ = false, more_ = false;
  std::deque<Notice> notices_;
  size_t notice_sent_ = 0;  // bytes sent of the first notice
  // Receiving: the frame at the front.
  Header in_{};
  size_t head_have_ = 0, payload_left_ = 0;
  bool whole_ = false, discarding_ = false;
  uint64_t frames_sent_ = 0, bytes_written_ = 0, bytes_received_ = 0;
};

}  // namespace pycomm
