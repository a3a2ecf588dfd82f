// What a call means before anything of it moves: whether it makes sense, and what kind it is. Pure;
// HostGroup asks.
#pragma once

#include <cstddef>
#include <span>

#include "group/group.h"

namespace pycomm {

// Throws InvalidArgument or Unsupported for a call that rank `rank` of `size` cannot make.
void check_call(const Call& call, int rank, int size);

bool is_plan(Operation operation);  // else a message
bool is_rooted(Operation operation);
bool reduces(Operation operation);

size_t total(std::span<const size_t> counts);

}  // namespace pycomm
