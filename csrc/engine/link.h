// Frames over a channel: a header and its payload, sent and received in pieces as they fit.
//
// A link also keeps the stream valid when a call fails. A frame that was begun is still sent
// completely, with its true bytes, because its receiver may use them. A partly received frame is
// discarded. Notices are sent between frames.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/frame_reader.h"
#include "engine/frame_writer.h"
#include "transport/frame.h"
#include "transport/transport.h"

namespace pycomm::engine {

class Link {
 public:
  explicit Link(std::unique_ptr<transport::Channel> channel)
      : channel_(std::move(channel)), writer_(*channel_), reader_(*channel_) {}

  // Sending. begin() may be called once idle(); its payload must stay valid until the frame is sent
  // or abandoned. push() sends what fits now and returns the payload bytes sent.
  bool idle() const { return writer_.idle(); }
  // `more`: another frame follows immediately.
  void begin(const transport::Header& header, transport::ConstBytes payload, bool more = false) {
    writer_.begin(header, payload, more);
  }
  size_t push() { return writer_.push(); }
  // Releases the payload of the current frame: copies its unsent rest, for flush().
  void abandon() { writer_.abandon(); }
  // Queues a notice, a frame with a short text, behind what is being sent.
  void post(const transport::Header& header, const std::string& text) {
    writer_.post(header, text);
  }
  // Sends the rest of an abandoned frame, and notices. True when nothing is left.
  bool flush() { return writer_.flush(); }
  // Closes this side; the channel delivers the unsent bytes.
  void close() noexcept;

  // Receiving. front() is the header of the frame at the front, or null until it has arrived
  // completely. Take the payload in pieces, then call finish() to get to the next frame. Throws
  // PeerLost if the bytes are not a valid header.
  const transport::Header* front() { return reader_.front(); }
  bool has_front() const { return reader_.has_front(); }
  size_t payload_left() const { return reader_.payload_left(); }
  transport::ConstBytes peek() { return reader_.peek(); }
  void take(size_t bytes) { reader_.take(bytes); }
  size_t receive(transport::Bytes into) { return reader_.receive(into); }
  void finish() { reader_.finish(); }
  // Discards the frame at the front, including the part that has not arrived yet.
  void discard() { reader_.discard(); }
  // Looks behind the frame at the front for the next frame of this kind, without taking anything:
  // the part of its payload that has arrived; null if no such frame has arrived.
  std::optional<transport::ConstBytes> behind_front(transport::FrameKind kind) {
    return reader_.behind_front(kind);
  }

  transport::Channel& channel() { return *channel_; }
  uint64_t frames_sent() const { return writer_.frames_sent(); }
  uint64_t bytes_written() const { return writer_.bytes_written(); }
  uint64_t bytes_received() const { return reader_.bytes_received(); }

 private:
  std::unique_ptr<transport::Channel> channel_;
  FrameWriter writer_;
  FrameReader reader_;
};

}  // namespace pycomm::engine
