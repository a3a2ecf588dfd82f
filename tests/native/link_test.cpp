// Frames over a channel that moves any number of bytes at a time: the guarantees of engine/link.h.
#include "engine/link.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "harness.h"
#include "played_channels.h"

namespace {

using namespace pycomm;
using namespace pycomm::transport;
using namespace played;
using Buffer = std::vector<std::byte>;

// A channel that moves 1 to `grain` bytes at a time, at random, and holds at most `capacity`.
std::unique_ptr<Channel> trickle(Wire& out, Wire& in, size_t grain, size_t capacity) {
  return std::make_unique<Pipe>(out, in, capacity, [grain, random = std::mt19937(grain)]() mutable {
    return 1 + random() % grain;
  });
}

struct Line {
  explicit Line(size_t grain, size_t capacity = 10'000)
      : sender(trickle(there, back, grain, capacity)),
        receiver(trickle(back, there, grain, capacity)) {}
  Wire there, back;
  engine::Link sender, receiver;
};

Buffer pattern(size_t bytes, int seed) {
  Buffer buffer(bytes);
  for (size_t i = 0; i < bytes; ++i) buffer[i] = static_cast<std::byte>(i * 31 + i / 251 + seed);
  return buffer;
}

Header header_of(size_t bytes, uint32_t sequence) {
  return {.sequence = sequence, .bytes = static_cast<uint32_t>(bytes), .count = bytes};
}

void begin(engine::Link& link, const Buffer& payload, uint32_t sequence) {
  link.begin(header_of(payload.size(), sequence), payload);
}

constexpr int kTries = 1'000'000;  // of a loop that must end

// Receives the frame at the front, alternating peek and receive.
Buffer take_frame(
    engine::Link& link, uint32_t sequence, const std::function<void()>& meanwhile = [] {}) {
  const Header* header = nullptr;
  for (int i = 0; i < kTries && header == nullptr; ++i) {
    meanwhile();
    header = link.front();
  }
  expect(header != nullptr, "no frame arrived");
  expect_equal(header->sequence, sequence, "sequence of the frame");
  Buffer got;
  for (int i = 0; i < kTries && link.payload_left() > 0; ++i) {
    meanwhile();
    if (i % 2 == 0) {
      const ConstBytes here = link.peek();
      got.insert(got.end(), here.begin(), here.end());
      link.take(here.size());
    } else {
      Buffer into(100);
      into.resize(link.receive(into));
      got.insert(got.end(), into.begin(), into.end());
    }
  }
  expect_equal(link.payload_left(), size_t{0}, "payload left");
  link.finish();
  return got;
}

const Test kCut("a frame of any size arrives whole, however it is split", [] {
  for (const size_t grain : {1, 2, 31, 32, 33, 1000, 100'000}) {
    Line line(grain, 50);
    uint32_t sequence = 0;
    for (const size_t bytes : {0, 1, 0, 31, 32, 1000, 0, 5000}) {
      const Buffer payload = pattern(bytes, static_cast<int>(sequence));
      begin(line.sender, payload, ++sequence);
      const auto feed = [&] { line.sender.push(); };
      expect(take_frame(line.receiver, sequence, feed) == payload, "another payload arrived");
      expect(line.sender.idle(), "the sender is not done");
    }
    expect_equal(line.sender.traffic().frames_sent, uint64_t{8}, "frames");
    expect_equal(line.sender.traffic().bytes_written, line.receiver.traffic().bytes_received,
                 "bytes");
    expect_equal(line.sender.traffic().bytes_written, uint64_t{8 * 32 + 6064}, "bytes written");
  }
});

const Test kNotices("notices are sent between frames, in order", [] {
  for (const size_t grain : {1, 7, 40, 100'000}) {
    Line line(grain, 60);
    const Buffer payload = pattern(500, 1);
    begin(line.sender, payload, 1);
    line.sender.push();
    line.sender.post({.kind = FrameKind::mismatch, .sequence = 2}, "first");
    line.sender.post({.kind = FrameKind::goodbye, .sequence = 3}, std::string(5000, 'x'));
    expect(!line.sender.flush(), "a notice was sent before the frame was done");
    const auto feed = [&] {
      line.sender.push();
      line.sender.flush();
    };
    expect(take_frame(line.receiver, 1, feed) == payload, "a notice was sent inside the frame");
    const Buffer first = take_frame(line.receiver, 2, [&] { line.sender.flush(); });
    expect(std::string(reinterpret_cast<const char*>(first.data()), first.size()) == "first",
           "another sentence");
    const Buffer second = take_frame(line.receiver, 3, [&] { line.sender.flush(); });
    expect_equal(second.size(), kNoticeBytes, "bytes of a long text");
    expect(line.sender.idle() && line.sender.flush(), "some bytes are still unsent");
  }
});

const Test kAbandon(
    "an abandoned frame arrives with its original bytes, and the next is valid", [] {
      for (size_t out = 0; out < 120;
           ++out) {  // wire bytes that are sent when the frame is abandoned
        Line line(1);
        Buffer payload = pattern(80, 5);
        const Buffer truth = payload;
        begin(line.sender, payload, 1);
        for (int i = 0; i < kTries && line.there.size() < std::min<size_t>(out, 112); ++i)
          line.sender.push();
        line.sender.abandon();
        std::fill(payload.begin(), payload.end(), std::byte{0xee});  // the caller reuses it
        line.sender.abandon();                                       // idempotent
        line.sender.post({.sequence = 2}, "why");
        const auto flush = [&] { line.sender.flush(); };
        if (out > 0) expect(take_frame(line.receiver, 1, flush) == truth, "not the original bytes");
        expect_equal(take_frame(line.receiver, 2, flush).size(), size_t{3}, "bytes of the notice");
        const Buffer next = pattern(90, 6);
        begin(line.sender, next, 3);
        const auto feed = [&] { line.sender.push(); };
        expect(take_frame(line.receiver, 3, feed) == next, "the next frame is not valid");
        expect_equal(line.sender.traffic().frames_sent, uint64_t{out > 0 ? 3u : 2u}, "frames");
      }
    });

const Test kDiscard("discarded bytes are dropped on arrival; later bytes stay", [] {
  for (size_t taken = 0; taken < 50; taken += 7) {
    Line line(3, 20);
    const Buffer payload = pattern(50, 7), next = pattern(20, 8);
    begin(line.sender, payload, 1);
    const auto feed = [&] {
      line.sender.push();
      if (line.sender.idle() && line.sender.traffic().frames_sent == 1) begin(line.sender, next, 2);
    };
    for (int i = 0; i < kTries && line.receiver.front() == nullptr; ++i) feed();
    Buffer into(taken);
    for (size_t have = 0; have < taken; feed())
      have += line.receiver.receive(Bytes(into).subspan(have));
    line.receiver.discard();
    expect(take_frame(line.receiver, 2, feed) == next, "the frame behind it is not valid");
  }
});

const Test kGarbage("an invalid header is reported as the sender's error", [] {
  for (const int kind : {0, 1, 2, 3}) {
    Line line(100'000);
    Header header;
    if (kind == 0) header.magic = 0x1234;
    if (kind == 1) header.version = 99;
    if (kind == 3) header.bytes = kSegmentBytes + 1;
    const auto* bytes = reinterpret_cast<const std::byte*>(&header);
    line.there.assign(bytes, bytes + sizeof header);
    for (int i = 0; i < 31; ++i) line.there.pop_back();
    expect(line.receiver.front() == nullptr, "a header of one byte");
    line.there.assign(bytes + 1, bytes + sizeof header);
    if (kind == 2) {
      for (int i = 0; i < kTries && line.receiver.front() == nullptr; ++i) continue;
      continue;
    }
    expect_throws<PeerLost>([&] {
      for (int i = 0; i < kTries; ++i) (void)line.receiver.front();
    });
  }
});

const Test kMisuse("a frame inside a frame, and an early end, are internal errors", [] {
  Line line(10);
  const Buffer payload = pattern(100, 1);
  begin(line.sender, payload, 1);
  expect_throws<InternalError>([&] { begin(line.sender, payload, 2); });
  expect_throws<InternalError>([&] { line.receiver.finish(); });
});

}  // namespace
