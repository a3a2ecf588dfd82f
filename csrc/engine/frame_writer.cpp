#include "engine/frame_writer.h"

#include <algorithm>

#include "core/errors.h"

namespace pycomm::engine {
namespace {

transport::ConstBytes bytes_of(const transport::Header& header) {
  return std::as_bytes(std::span(&header, 1));
}

}  // namespace

size_t FrameWriter::write(transport::ConstBytes head, transport::ConstBytes body, bool more) {
  channel_.expect_more(more);
  const size_t n = channel_.send(head, body);
  bytes_written_ += n;
  return n;
}

void FrameWriter::begin(const transport::Header& header, transport::ConstBytes payload, bool more) {
  check(idle() && header.bytes == payload.size(), "a frame was begun inside another");
  out_ = header;
  head_left_ = sizeof(transport::Header);
  body_ = payload;
  abandoned_ = false;
  more_ = more;
  ++frames_sent_;
}

size_t FrameWriter::push() {
  const size_t n = write(bytes_of(out_).last(head_left_), body_, more_ && !abandoned_);
  const size_t head = std::min(n, head_left_);
  head_left_ -= head;
  body_ = body_.subspan(n - head);
  return n - head;
}

void FrameWriter::abandon() {
  if (abandoned_ || !open()) return;
  if (head_left_ == sizeof(transport::Header)) {  // nothing of it was sent
    head_left_ = 0;
    body_ = {};
    --frames_sent_;
    return;
  }
  abandoned_body_.assign(body_.begin(), body_.end());
  body_ = abandoned_body_;
  abandoned_ = true;
}

void FrameWriter::post(transport::Header header, const std::string& text) {
  notices_.push_back({header, text.substr(0, transport::kNoticeBytes)});
  notices_.back().header.bytes = static_cast<uint32_t>(notices_.back().text.size());
}

bool FrameWriter::flush() {
  if (open() && !abandoned_) return false;  // a notice must not split a frame
  if (open()) push();
  if (open()) return false;
  while (!notices_.empty()) {
    const Notice& notice = notices_.front();
    const auto head = bytes_of(notice.header);
    const auto body = std::as_bytes(std::span(notice.text));
    const size_t in_head = std::min(notice_sent_, head.size());
    const size_t n = write(head.subspan(in_head), body.subspan(notice_sent_ - in_head), false);
    notice_sent_ += n;
    if (notice_sent_ < head.size() + body.size()) return false;
    ++frames_sent_;
    notice_sent_ = 0;
    notices_.pop_front();
  }
  return true;
}

// Empty if a frame is open and not abandoned: its payload may be invalid, and nothing can follow
// it.
std::vector<std::byte> FrameWriter::unsent() const {
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

}  // namespace pycomm::engine
