// A call with everything that is computed once for it. It is handed down by reference.
#pragma once

#include <span>
#include <vector>

#include "core/deadline.h"
#include "engine/engine.h"
#include "group/group.h"
#include "kernels/kernels.h"
#include "transport/frame.h"

namespace pycomm::group {

struct PreparedCall {
  const Call& call;
  const kernels::Reducer* reducer;  // null: the call adds nothing
  Deadline deadline;
  std::span<const engine::MessageRequest>
      messages{};                         // of an exchange(), whose first call is `call`
  std::vector<size_t>* agreed = nullptr;  // the accepted messages, if they are on devices
  MessageProgress* progress = nullptr;    // as of Group::exchange()
  // CallRunner::prepare() sets these when the call's turn comes.
  Algorithm algorithm = Algorithm::automatic;  // never `automatic` after prepare(), except devices
  transport::Header header{};                  // of its frames, with epoch and sequence
};

}  // namespace pycomm::group
