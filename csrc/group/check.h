// What a call means before anything of it moves: whether it makes sense, and what kind it is. Pure;
// HostGroup asks.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/deadline.h"
#include "group/flight_recorder.h"
#include "group/group.h"
#include "transport/frame.h"

namespace pycomm {

// Throws InvalidArgument or Unsupported for a call that rank `rank` of `size` cannot make.
void check_call(const Call& call, int rank, int size);

// Throws Unsupported: what a group on devices cannot do.
[[noreturn]] void throw_unsupported(const Call& call, const std::string& what);

// Elements of the arrays that this rank reads and writes.
struct Extent {
  size_t input = 0, output = 0;
};
Extent extent_of(const Call& call, int rank, int size);

bool is_plan(Operation operation);  // else a message
bool is_rooted(Operation operation);
bool reduces(Operation operation);

// What every frame of the call says of it; epoch and sequence are the engine's.
Header signature_of(const Call& call, Algorithm algorithm);

// The call as it begins. `header` is its signature with epoch and sequence.
CallRecord record_of(const Call& call, const Header& header, const Deadline& deadline);

size_t total(std::span<const size_t> counts);

// The count by which an algorithm is chosen: of a list of counts what all ranks know alike.
size_t count_to_choose_by(const Call& call);

}  // namespace pycomm
