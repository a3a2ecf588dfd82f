// Validates and classifies a call before any data is sent. Pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/deadline.h"
#include "group/group.h"
#include "kernels/kernels.h"
#include "observe/flight_recorder.h"
#include "transport/frame.h"

namespace pycomm::group {

// Throws InvalidArgument or Unsupported if rank `rank` of `size` cannot make the call. Returns the
// reducer of a call that adds, else null.
const kernels::Reducer* check_call(const Call& call, int rank, int size);

// Throws Unsupported with `what`, the feature that a device group lacks.
[[noreturn]] void throw_unsupported(const Call& call, const std::string& what);

// Elements of the arrays that this rank reads and writes.
struct Extent {
  size_t input = 0, output = 0;
};
Extent extent_of(const Call& call, int rank, int size);

bool is_plan(Operation operation);  // false: a send or recv
bool is_rooted(Operation operation);
bool reduces(Operation operation);

// The fields of a frame header that identify the call. The engine adds epoch and sequence.
transport::Header signature_of(const Call& call, Algorithm algorithm);

// The flight record of a call at its start. `header` is its signature with epoch and sequence.
observe::CallRecord record_of(const Call& call, const transport::Header& header,
                              const Deadline& deadline);

size_t total(std::span<const size_t> counts);

// The count for choosing an algorithm. For lists of counts it depends only on what all ranks know.
size_t count_to_choose_by(const Call& call);

}  // namespace pycomm::group
