// A plan as a stream runs it: stages of concurrent messages and the kernels that combine them.
//
// A stage is one NCCL group and the kernels after it; the next stage begins when both are done. A
// move joins the previous stage if it neither reads nor overwrites data that stage writes. So a
// ring of n ranks has 2 (n - 1) stages, and a one-step exchange with all peers has one. These are
// pure functions, without device or NCCL.
#pragma once

#include <vector>

#include "collectives/plan.h"

namespace pycomm::device {

struct StreamStage {
  struct Message {
    int peer;
    collectives::Range range;
  };
  // Work after the messages, in order: `arrived` is combined into `in` as in Move. A copy of an
  // empty range fills `in` with zeros.
  struct Step {
    collectives::Combine combine;
    collectives::Range in, with, arrived;
  };
  std::vector<Message> sends, receives;  // per peer in the order of the plan
  std::vector<Step> steps;
};

struct StreamStages {
  std::vector<StreamStage> stages;
  size_t scratch = 0;  // elements: the plan's, then received data to combine
};

// Omits messages without elements, which only signal that a rank has begun: the NCCL calls do that.
StreamStages make_stream_stages(const collectives::Plan& plan, int rank);

// Splits the plan into channels: each has its slice of every range, so elements are combined in the
// same order as in the whole plan. Each channel needs scratch of its own. With several channels,
// each range that a move reads must have been written as one range, if at all: use it for rings
// only. One channel works for every plan.
std::vector<StreamStages> make_channels(const collectives::Plan& plan, int rank, int channels);

}  // namespace pycomm::device
