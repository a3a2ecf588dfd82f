// A call with everything that is computed once for it. It is handed down by reference.
#pragma once

#include <span>
#include <vector>

#include "core/deadline.h"
#include "engine/engine.h"
#include "group/group.h"

namespace pycomm::group {

struct PreparedCall {
  const Call& call;
  engine::Job job{};  // `reducer`: null if the call adds nothing; the rest as below
  Deadline deadline;
  std::span<const engine::MessageRequest>
      messages{};                         // of an exchange(), whose first call is `call`
  std::vector<size_t>* agreed = nullptr;  // the accepted messages, if they are on devices
  MessageProgress* progress = nullptr;    // as of Group::exchange()
  // CallRunner::prepare() sets it and `job`, but for the plan, when the call's turn comes. Never
  // `automatic` then, except on devices.
  Algorithm algorithm = Algorithm::automatic;
};

}  // namespace pycomm::group
