// A rank that dies during a call: its channels are disconnected, and it does nothing more.
#pragma once

#include <poll.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "ranks.h"

namespace ranks {

using namespace pycomm;

inline constexpr size_t kRing = size_t{128} << 10;

// The bytes that a dying rank may still send, and its channels, which close together.
struct Life {
  size_t left = SIZE_MAX;
  std::vector<class Mortal*> channels{};
  void end();
};

struct Died : std::runtime_error {
  Died() : std::runtime_error("died") {}
};

// Forwards everything until its rank dies: then the peer sees a close inside a frame.
class Mortal final : public transport::Channel {
 public:
  Mortal(std::unique_ptr<transport::Channel> inner, Life& life)
      : inner_(std::move(inner)), life_(life) {
    life.channels.push_back(this);
  }
  void die() { inner_.reset(); }

  std::string_view transport() const override { return "mortal"; }
  size_t send(transport::ConstBytes head, transport::ConstBytes body) override {
    if (!inner_) return head.size() + body.size();
    const auto allowed = [&](transport::ConstBytes b, size_t n) {
      return b.first(std::min(b.size(), n));
    };
    const transport::ConstBytes first = allowed(head, life_.left);
    const size_t n = inner_->send(first, allowed(body, life_.left - first.size()));
    life_.left -= n;
    if (life_.left == 0) {
      life_.end();
      throw Died();
    }
    return n;
  }
  transport::ConstBytes peek(size_t want) override {
    return inner_ ? inner_->peek(want) : transport::ConstBytes{};
  }
  void take(size_t bytes) override { inner_->take(bytes); }
  size_t receive(transport::Bytes into) override { return inner_ ? inner_->receive(into) : 0; }
  bool is_closed() const override { return !inner_ || inner_->is_closed(); }
  pollfd arm(transport::Want want) override {
    return inner_ ? inner_->arm(want) : pollfd{-1, 0, 0};
  }
  void disarm(short revents) override {
    if (inner_) inner_->disarm(revents);
  }
  void wake_peer() override {
    if (inner_) inner_->wake_peer();
  }
  void close(transport::ConstBytes unsent) override {
    if (inner_) inner_->close(unsent);
  }

 private:
  std::unique_ptr<transport::Channel> inner_;
  Life& life_;
};

inline void Life::end() {
  for (Mortal* channel : channels) channel->die();
}

// All ranks to all others; those of `mortal` close when it has sent `lifetime` bytes.
struct Channels {
  Channels(int size, const std::string& transport, int mortal, size_t lifetime)
      : channels(static_cast<size_t>(size)) {
    life.left = lifetime;
    for (auto& row : channels) row.resize(static_cast<size_t>(size));
    for (size_t i = 0; i < channels.size(); ++i)
      for (size_t j = i + 1; j < channels.size(); ++j) {
        auto [a, b] = channel_pair(transport, kRing);
        channels[i][j] = std::move(a);
        channels[j][i] = std::move(b);
      }
    for (auto& channel : channels[static_cast<size_t>(mortal)])
      if (channel) channel = std::make_unique<Mortal>(std::move(channel), life);
  }
  std::unique_ptr<engine::Engine> engine(int rank) {
    engine::EngineOptions options{.rank = rank, .names = {}, .interrupted = {}};
    for (size_t i = 0; i < channels.size(); ++i)
      options.names.push_back("rank " + std::to_string(i));
    return std::make_unique<engine::Engine>(std::move(channels[static_cast<size_t>(rank)]),
                                            std::move(options));
  }
  Life life;
  std::vector<std::vector<std::unique_ptr<transport::Channel>>> channels;
};

}  // namespace ranks
