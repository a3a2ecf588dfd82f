// Frames over a channel: a header and its payload, sent and received in pieces as they fit.
//
// A link also keeps the stream whole when a call fails in the middle: a frame that was begun still
// goes out, with its true bytes, for its receiver may take it for good; one that was half received
// is thrown away; and notices go out between frames.
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

  // Sending. begin() may be called once idle(); its payload stays where it is until the frame is
  // out or abandoned. push() sends what fits of it and gives the payload bytes that went.
  bool idle() const { return !open() && notices_.empty(); }
  // `more`: another frame follows at once.
  void begin(const Header& header, ConstBytes payload, bool more = false);
  size_t push();
  // Lets go of the payload of the frame in the making: what is left of it is copied, for flush().
  void abandon();
  // Queues a frame of one sentence behind what is being sent.
  void post(Header header, const std::string& text);
  // Sends the rest of an abandoned frame, and notices. True when nothing is left.
  bool flush();
  // Ends this side; the channel delivers what is unsent.
  void close() noexcept;

  // Receiving. front() is the header of the frame at the front, or null until it has arrived whole;
  // its payload is then taken bit by bit, and finish() makes way for the next frame. Throws
  // PeerLost on bytes that are no header.
  const Header* front();
  bool has_front() const { return whole_ && !discarding_; }
  size_t payload_left() const { return payload_left_; }
  ConstBytes peek();
  void take(size_t bytes);
  size_t receive(Bytes into);
  void finish();
  // Throws the frame at the front away, now and as the rest of it arrives.
  void discard();
  // Takes nothing: what has arrived so far, behind the frame at the front, of the payload of the
  // next frame of this kind; null where no such frame is in sight.
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
  // Sending: what is left of the frame in the making. The body is the caller's, or
  // `abandoned_body_`.
  Header out_{};
  size_t head_left_ = 0;
  ConstBytes body_;
  std::vector<std::byte> abandoned_body_;
  bool abandoned_ = false, more_ = false;
  std::deque<Notice> notices_;
  size_t notice_sent_ = 0;  // bytes of the first notice that are out
  // Receiving: the frame at the front.
  Header in_{};
  size_t head_have_ = 0, payload_left_ = 0;
  bool whole_ = false, discarding_ = false;
  uint64_t frames_sent_ = 0, bytes_written_ = 0, bytes_received_ = 0;
};

}  // namespace pycomm
