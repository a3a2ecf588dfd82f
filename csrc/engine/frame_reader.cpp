#include "engine/frame_reader.h"

#include <algorithm>
#include <cstring>

#include "core/errors.h"

namespace pycomm::engine {

const transport::Header* FrameReader::front() {
  if (discarding_ && !drop()) return nullptr;
  if (!whole_ && !read_header()) return nullptr;
  return &in_;
}

bool FrameReader::read_header() {
  const transport::Bytes header = std::as_writable_bytes(std::span(&in_, 1));
  while (head_have_ < sizeof(transport::Header)) {  // a channel may return less than has arrived
    const size_t n = channel_.receive(header.subspan(head_have_));
    if (n == 0) return false;
    head_have_ += n;
    bytes_received_ += n;
  }
  if (in_.magic != transport::Header::kMagic || in_.version != transport::Header::kVersion ||
      in_.bytes > transport::kSegmentBytes)
    throw PeerLost("received bytes that are not a frame of this version");
  whole_ = true;
  payload_left_ = in_.bytes;
  return true;
}

bool FrameReader::drop() {
  while (payload_left_ > 0) {
    const size_t n = peek().size();
    if (n == 0) return false;
    take(n);
  }
  discarding_ = false;
  finish();
  return true;
}

void FrameReader::finish() {
  check(whole_ && payload_left_ == 0, "a frame was finished before its end");
  whole_ = false;
  head_have_ = 0;
}

void FrameReader::take(size_t bytes) {
  channel_.take(bytes);
  payload_left_ -= bytes;
  bytes_received_ += bytes;
}

size_t FrameReader::receive(transport::Bytes into) {
  const size_t n = channel_.receive(into.first(std::min(into.size(), payload_left_)));
  payload_left_ -= n;
  bytes_received_ += n;
  return n;
}

void FrameReader::discard() {
  if (whole_) discarding_ = true;
}

std::optional<transport::ConstBytes> FrameReader::behind_front(transport::FrameKind kind) {
  const transport::ConstBytes here = channel_.peek(SIZE_MAX);
  transport::Header header;
  for (size_t at = payload_left_; at + sizeof header <= here.size(); at += header.bytes) {
    std::memcpy(&header, here.data() + at, sizeof header);
    at += sizeof header;
    if (header.kind == kind)
      return here.subspan(at, std::min<size_t>(header.bytes, here.size() - at));
  }
  return std::nullopt;
}

}  // namespace pycomm::engine
