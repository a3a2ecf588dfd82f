// A plan as a stream runs it: stages of messages that travel at once, and what is done with them.
//
// A stage is one NCCL group and the kernels behind it; the next begins when both are through. A
// move joins the stage before it as long as it neither reads nor overwrites what that stage writes,
// so a ring of n ranks has 2 (n - 1) stages and everything that is sent to everybody has one. Pure:
// no device, no NCCL. Called by stream_engine.cpp.
#pragma once

#include <vector>

#include "collectives/plan.h"

namespace pycomm {

struct StreamStage {
  struct Message {
    int peer;
    Range range;
  };
  // What follows the messages, in order: `arrived` is combined into `in` as Move says. copy of
  // nothing fills with zeros.
  struct Step {
    Combine combine;
    Range in, with, arrived;
  };
  std::vector<Message> sends, receives;  // those of one peer in the order of the plan
  std::vector<Step> steps;
};

struct StreamStages {
  std::vector<StreamStage> stages;
  size_t scratch = 0;  // elements: the plan's, and behind them those that wait to be combined
};

// Messages without elements say only that a rank has come, and are left out: NCCL's calls do that.
StreamStages make_stream_stages(const Plan& plan, int rank);

// The same cut into lanes: each has its slice of every range, so that elements meet the same ones
// in the same order as in the whole, and needs scratch of its own. For plans in which what a move
// reads was written as one range, if at all: rings; one lane is for all.
std::vector<StreamStages> make_lanes(const Plan& plan, int rank, int lanes);

}  // namespace pycomm
