#include "device/stages.h"

#include <algorithm>
#include <utility>

namespace pycomm::device {
namespace {

// Received data to combine starts at a multiple of this many elements of scratch, so kernels find
// it aligned to 16 bytes for every dtype.
constexpr size_t kAligned = 16;

size_t aligned(size_t count) { return (count + kAligned - 1) / kAligned * kAligned; }

// `input` and `output` may be the same array, so ranges in either can overlap.
bool overlap(const collectives::Range& a, const collectives::Range& b) {
  return (a.space == collectives::Space::scratch) == (b.space == collectives::Space::scratch) &&
         a.begin < b.begin + b.count && b.begin < a.begin + a.count;
}

// The current stage and the ranges that it reads and writes.
class Maker {
 public:
  explicit Maker(size_t plan_scratch) : first_(aligned(plan_scratch)), free_(first_) {
    made_.scratch = plan_scratch;
  }

  // The send and the receive of a move belong to one stage, because the peers may need both at
  // once.
  void exchange(const collectives::Move& move, int rank) {
    const bool sends = move.to != collectives::kNoRank && move.to != rank && move.out.count > 0;
    const bool receives =
        move.from != collectives::kNoRank && move.from != rank && move.in.count > 0;
    const bool copies = receives && move.combine == collectives::Combine::copy;
    begin_if((sends && any(writes_, move.out)) ||
             (copies && (any(writes_, move.in) || any(reads_, move.in))));
    if (sends) {
      stage_.sends.push_back({move.to, move.out});
      reads_.push_back(move.out);
    }
    if (copies) {
      stage_.receives.push_back({move.from, move.in});
      writes_.push_back(move.in);
    } else if (receives) {  // after the plan's scratch, to be combined
      const collectives::Range staged{collectives::Space::scratch, free_, move.in.count};
      free_ += aligned(move.in.count);
      made_.scratch = std::max(made_.scratch, staged.begin + staged.count);
      stage_.receives.push_back({move.from, staged});
      step({move.combine, move.in, move.with, staged});
    }
  }

  // Steps run after the messages of their stage, in order.
  void step(const StreamStage::Step& step) {
    if (step.in.count == 0) return;
    stage_.steps.push_back(step);
    writes_.push_back(step.in);
    reads_.push_back(step.arrived);
    if (step.combine == collectives::Combine::reduce ||
        step.combine == collectives::Combine::finish)
      reads_.push_back(step.with);
  }

  StreamStages finish() {
    begin_if(true);
    return std::move(made_);
  }

 private:
  static bool any(const std::vector<collectives::Range>& all, const collectives::Range& range) {
    return std::ranges::any_of(all,
                               [&](const collectives::Range& one) { return overlap(one, range); });
  }

  void begin_if(bool conflict) {
    if (!conflict) return;
    if (!stage_.sends.empty() || !stage_.receives.empty() || !stage_.steps.empty())
      made_.stages.push_back(std::exchange(stage_, {}));
    reads_.clear();
    writes_.clear();
    free_ = first_;
  }

  size_t first_, free_;  // of scratch: after the plan's
  StreamStages made_;
  StreamStage stage_;
  std::vector<collectives::Range> reads_, writes_;
};

collectives::Range slice_of(const collectives::Range& range, int channel, int channels) {
  const collectives::Range slice = collectives::piece(range.space, range.count, channels, channel);
  return {range.space, range.begin + slice.begin, slice.count};
}

collectives::Plan channel_of(const collectives::Plan& plan, int channel, int channels) {
  collectives::Plan part = plan;
  for (collectives::Move& move : part.moves)
    for (collectives::Range* range : {&move.out, &move.in, &move.with})
      *range = slice_of(*range, channel, channels);
  return part;
}

}  // namespace

std::vector<StreamStages> make_channels(const collectives::Plan& plan, int rank, int channels) {
  std::vector<StreamStages> all;
  for (int channel = 0; channel < channels; ++channel)
    all.push_back(make_stream_stages(channel_of(plan, channel, channels), rank));
  return all;
}

StreamStages make_stream_stages(const collectives::Plan& plan, int rank) {
  Maker maker(plan.scratch);
  for (const collectives::Move& move : plan.moves) {
    maker.exchange(move, rank);
    if (move.from == rank) maker.step({move.combine, move.in, move.with, move.out});
  }
  return maker.finish();
}

}  // namespace pycomm::device
