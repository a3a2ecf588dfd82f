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
#include <utility>
#include <vector>

#include "engine/aside_frames.h"
#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::engine {

// What a link sent and received since its start, also parts of frames.
struct LinkTraffic {
  uint64_t frames_sent = 0, payload_sent = 0, bytes_written = 0, bytes_received = 0;
};

class Link {
 public:
  explicit Link(std::unique_ptr<transport::Channel> channel) : channel_(std::move(channel)) {}

  // Sending. begin() may be called once idle(); its payload must stay valid until the frame is sent
  // or abandoned. `more`: another frame follows immediately.
  bool idle() const { return !open() && notices_.empty(); }
  void begin(const transport::Header& header, transport::ConstBytes payload, bool more = false);
  // Sends what fits now; returns the payload bytes sent.
  size_t push();
  // Releases the payload of the current frame: copies its unsent rest, for flush().
  void abandon();
  // Queues a notice, a frame with a short text, behind what is being sent.
  void post(transport::Header header, const std::string& text);
  // Sends the rest of an abandoned frame, and notices. True when nothing is left.
  bool flush();
  // Closes this side; the channel delivers the unsent bytes.
  void close() noexcept;

  // Receiving. front() is the header of the frame at the front, or null until it has arrived
  // completely. Take the payload in pieces, then call finish() to get to the next frame. Throws
  // PeerLost if the bytes are not a valid header.
  const transport::Header* front();
  bool has_front() const { return front_ == Front::whole; }
  size_t payload_left() const { return aside_.is_read() ? aside_.left() : payload_left_; }
  transport::ConstBytes peek() {
    return aside_.is_read() ? aside_.peek() : channel_->peek(payload_left_);
  }
  void take(size_t bytes);
  size_t receive(transport::Bytes into);
  void finish();
  // Discards the frame at the front, including the part that has not arrived yet.
  void discard();
  // Buffers the frame at the front, including the part that has not arrived yet, so that the next
  // one gets there.
  void set_aside();
  // Like front(), of the first frame that is set aside. Until the next front(), payload_left(),
  // peek(), take(), receive(), finish() and discard() refer to it.
  const transport::Header* front_aside();
  // Looks behind the frame at the front for the next frame of this kind, without taking anything:
  // the part of its payload that has arrived; null if no such frame has arrived.
  std::optional<transport::ConstBytes> behind_front(transport::FrameKind kind);

  transport::Channel& channel() { return *channel_; }
  const LinkTraffic& traffic() const { return traffic_; }

 private:
  struct Notice {
    transport::Header header;
    std::string text;
  };
  // The frame at the front of the channel: its header has not arrived, or it is read, discarded, or
  // the last of aside_.
  enum class Front { none, whole, discarded, set_aside };

  bool open() const { return head_left_ > 0 || !body_.empty(); }
  std::vector<std::byte> unsent() const;
  bool read_header();
  bool drop();
  bool absorb();

  std::unique_ptr<transport::Channel> channel_;
  // The unsent rest of the current frame. The body is the caller's, or `abandoned_body_`.
  transport::Header out_{};
  size_t head_left_ = 0;
  transport::ConstBytes body_;
  std::vector<std::byte> abandoned_body_;
  bool abandoned_ = false, more_ = false;
  std::deque<Notice> notices_;
  size_t notice_sent_ = 0;  // bytes sent of the first notice
  // The frame at the front.
  transport::Header in_{};
  size_t head_have_ = 0, payload_left_ = 0;
  Front front_ = Front::none;
  AsideFrames aside_;
  LinkTraffic traffic_;
};

}  // namespace pycomm::engine
