// Channels whose peer is played by the test, and engines of two ranks over one channel.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "transport/transport.h"

namespace played {

using namespace pycomm;

// Takes everything that is sent; nothing arrives.
class PlayedChannel : public transport::Channel {
 public:
  using Bytes = transport::Bytes;
  using ConstBytes = transport::ConstBytes;

  std::string_view transport() const override { return "played"; }
  size_t send(ConstBytes head, ConstBytes body) override { return head.size() + body.size(); }
  ConstBytes peek(size_t) override { return {}; }
  void take(size_t) override {}
  size_t receive(Bytes) override { return 0; }
  bool is_closed() const override { return false; }
  pollfd arm(transport::Want) override { return {-1, 0, 0}; }
  void disarm(short) override {}
  void close(ConstBytes) override {}
};

// One direction of a connection, in memory.
using Wire = std::deque<std::byte>;

// Moves at most `grain()` bytes at a time, and sends none while the wire holds `limit`.
class Pipe final : public PlayedChannel {
 public:
  Pipe(Wire& out, Wire& in, size_t limit, std::function<size_t()> grain)
      : out_(out), in_(in), limit_(limit), grain_(std::move(grain)) {}

  size_t send(ConstBytes head, ConstBytes body) override {
    size_t left = std::min(grain_(), limit_ - std::min(limit_, out_.size()));
    const size_t all = std::min(left, head.size() + body.size());
    for (const ConstBytes part : {head, body}) {
      const size_t n = std::min(left, part.size());
      append(part.first(n));
      left -= n;
    }
    return all;
  }
  ConstBytes peek(size_t want) override {
    shown_.assign(in_.begin(), end_of(std::min(want, in_.size())));
    return shown_;
  }
  void take(size_t bytes) override { in_.erase(in_.begin(), end_of(bytes)); }
  size_t receive(Bytes into) override {
    const size_t n = std::min({into.size(), in_.size(), grain_()});
    std::copy_n(in_.begin(), n, into.begin());
    take(n);
    return n;
  }
  void close(ConstBytes unsent) override { append(unsent); }

 private:
  void append(ConstBytes bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  Wire::iterator end_of(size_t bytes) { return in_.begin() + static_cast<std::ptrdiff_t>(bytes); }

  Wire &out_, &in_;
  size_t limit_;
  std::function<size_t()> grain_;
  std::vector<std::byte> shown_;
};

// Of rank `options.rank` of two.
inline std::unique_ptr<engine::Engine> engine_of(std::unique_ptr<transport::Channel> peer,
                                                 engine::EngineOptions options = {}) {
  options.names = {"rank 0", "rank 1"};
  std::vector<std::unique_ptr<transport::Channel>> channels(2);
  channels[options.rank == 0] = std::move(peer);
  return std::make_unique<engine::Engine>(std::move(channels), std::move(options));
}

}  // namespace played
