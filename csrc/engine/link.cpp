#include "engine/link.h"

#include <algorithm>
#include <cstring>

#include "core/errors.h"

namespace pycomm::engine {
namespace {

transport::ConstBytes bytes_of(const transport::Header& header) {
  return std::as_bytes(std::span(&header, 1));
}

}  // namespace

void Link::begin(const transport::Header& header, transport::ConstBytes payload, bool more) {
  check(idle() && header.bytes == payload.size(), "a frame was begun inside another");
  out_ = header;
  head_left_ = sizeof(transport::Header);
  body_ = payload;
  abandoned_ = false;
  more_ = more;
  ++traffic_.frames_sent;
}

size_t Link::push() {
  channel_->expect_more(more_);
  const size_t n = channel_->send(bytes_of(out_).last(head_left_), body_);
  const size_t head = std::min(n, head_left_);
  head_left_ -= head;
  body_ = body_.subspan(n - head);
  traffic_.bytes_written += n;
  traffic_.payload_sent += n - head;
  return n - head;
}

void Link::abandon() {
  if (abandoned_ || !open()) return;
  if (head_left_ == sizeof(transport::Header)) {  // nothing of it was sent
    head_left_ = 0;
    body_ = {};
    --traffic_.frames_sent;
    return;
  }
  abandoned_body_.assign(body_.begin(), body_.end());
  body_ = abandoned_body_;
  abandoned_ = true;
  more_ = false;
}

void Link::post(transport::Header header, const std::string& text) {
  notices_.push_back({header, text.substr(0, transport::kNoticeBytes)});
  notices_.back().header.bytes = static_cast<uint32_t>(notices_.back().text.size());
}

bool Link::flush() {
  if (open() && !abandoned_) return false;  // a notice must not split a frame
  if (open()) push();
  if (open()) return false;
  while (!notices_.empty()) {
    const Notice& notice = notices_.front();
    const auto head = bytes_of(notice.header);
    const auto body = std::as_bytes(std::span(notice.text));
    const size_t in_head = std::min(notice_sent_, head.size());
    channel_->expect_more(false);
    const size_t n = channel_->send(head.subspan(in_head), body.subspan(notice_sent_ - in_head));
    traffic_.bytes_written += n;
    notice_sent_ += n;
    if (notice_sent_ < head.size() + body.size()) return false;
    ++traffic_.frames_sent;
    notice_sent_ = 0;
    notices_.pop_front();
  }
  return true;
}

void Link::close() noexcept {
  std::vector<std::byte> rest;
  try {
    rest = unsent();
  } catch (...) {  // out of memory: the peer sees only the closed connection
  }
  channel_->close(rest);
}

// Empty if a frame is open and not abandoned: its payload may be invalid, and nothing can follow
// it.
std::vector<std::byte> Link::unsent() const {
  std::vector<std::byte> rest;
  if (open() && !abandoned_) return rest;
  const auto add = [&](transport::ConstBytes bytes) {
    rest.insert(rest.end(), bytes.begin(), bytes.end());
  };
  add(bytes_of(out_).last(head_left_));
  add(body_);
  size_t sent = notice_sent_;
  for (const Notice& notice : notices_) {
    for (const transport::ConstBytes part :
         {bytes_of(notice.header), std::as_bytes(std::span(notice.text))}) {
      add(part.subspan(std::min(sent, part.size())));
      sent -= std::min(sent, part.size());
    }
  }
  return rest;
}

const transport::Header* Link::front() {
  aside_.end_read();
  if (front_ == Front::set_aside && !absorb()) return nullptr;
  if (front_ == Front::discarded && !drop()) return nullptr;
  if (front_ == Front::none && !read_header()) return nullptr;
  return &in_;
}

bool Link::read_header() {
  const transport::Bytes header = std::as_writable_bytes(std::span(&in_, 1));
  while (head_have_ < sizeof(transport::Header)) {  // a channel may return less than has arrived
    const size_t n = channel_->receive(header.subspan(head_have_));
    if (n == 0) return false;
    head_have_ += n;
    traffic_.bytes_received += n;
  }
  if (in_.magic != transport::Header::kMagic || in_.version != transport::Header::kVersion ||
      in_.bytes > transport::kSegmentBytes)
    throw PeerLost("received bytes that are not a frame of this version");
  front_ = Front::whole;
  payload_left_ = in_.bytes;
  return true;
}

bool Link::drop() {
  while (payload_left_ > 0) {
    const size_t n = peek().size();
    if (n == 0) return false;
    take(n);
  }
  finish();
  return true;
}

void Link::set_aside() {
  aside_.add(in_, payload_left_);
  front_ = Front::set_aside;
  (void)absorb();
}

// True when the frame at the front has arrived completely.
bool Link::absorb() {
  while (payload_left_ > 0) {
    const transport::ConstBytes here = peek();
    if (here.empty()) return false;
    aside_.append(here);
    take(here.size());
  }
  finish();
  return true;
}

const transport::Header* Link::front_aside() {
  aside_.end_read();
  if (front_ == Front::set_aside) (void)absorb();
  return aside_.begin_read();
}

void Link::discard() {
  const bool arrives = front_ == Front::set_aside && aside_.reads_last();
  if (aside_.is_read() ? arrives : front_ == Front::whole) front_ = Front::discarded;
  if (aside_.is_read()) aside_.drop();
}

void Link::take(size_t bytes) {
  if (aside_.is_read()) return aside_.take(bytes);
  channel_->take(bytes);
  payload_left_ -= bytes;
  traffic_.bytes_received += bytes;
}

size_t Link::receive(transport::Bytes into) {
  if (aside_.is_read()) return aside_.receive(into.first(std::min(into.size(), payload_left())));
  const size_t n = channel_->receive(into.first(std::min(into.size(), payload_left_)));
  payload_left_ -= n;
  traffic_.bytes_received += n;
  return n;
}

void Link::finish() {
  const bool whole = aside_.is_read() || front_ != Front::none;
  check(whole && payload_left() == 0, "a frame was finished before its end");
  if (aside_.is_read()) return aside_.drop();
  front_ = Front::none;
  head_have_ = 0;
}

std::optional<transport::ConstBytes> Link::behind_front(transport::FrameKind kind) {
  const transport::ConstBytes here = channel_->peek(SIZE_MAX);
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
