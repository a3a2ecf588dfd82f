// How the ranks agree about a collective on device arrays before one of them enqueues it: by a
// barrier whose frames carry the call's signature. For a message only its two ranks agree
// (engine/messenger.cpp).
//
// No rank leaves a barrier before it knows of every other rank, either directly or through ranks
// whose signature matched. So either all ranks pass or none does.
//
// Also compares the counts of an all_to_all before an output changes.
#include <string>
#include <vector>

#include "bootstrap/mesh.h"
#include "group/call_runner.h"
#include "group/check.h"

namespace pycomm::group {

void CallRunner::agree(const PreparedCall& prepared) {
  const Call& call = prepared.call;
  // Like a barrier, this returns once all ranks have sent their counts.
  if (call.operation == Operation::all_to_all && !call.counts.empty())
    return check_splits(prepared);
  engine::Job job{.header = prepared.job.header, .size = info_.size};
  if (shares_one_host()) return run_shared(job, prepared.deadline);
  const Call barrier;
  const Algorithm by = collectives::choose({.size = info_.size, .hosts = info_.host_count});
  job.schedule = &plans_.find(barrier, by, 0).schedule;
  engine::PlanTask task = begin_plan(job);
  engine_.run(task, job.header, prepared.deadline);
}

// Gathers the counts of all ranks in frames that carry the call's signature. The call's own frames
// tell a rank only the counts towards itself, so a rank with matching counts would miss a mismatch
// between two others. All ranks get the same table: all throw or none does, and the epoch
// continues.
//
// Cost: one all_gather of 2 size() counts from each rank.
void CallRunner::check_splits(const PreparedCall& prepared) {
  const auto size = static_cast<size_t>(info_.size);
  const std::vector<size_t> table = gather_splits(prepared);
  for (size_t from = 0; from < size; ++from)
    for (size_t to = 0; to < size; ++to) {
      const size_t sent = table[from * 2 * size + to];
      const size_t expected = table[to * 2 * size + size + from];
      if (sent == expected) continue;
      const int sender = static_cast<int>(from), receiver = static_cast<int>(to);
      const std::string op(name_of(prepared.call.operation));
      throw Mismatch("ranks disagree about call " + std::to_string(prepared.job.header.sequence) +
                         ": in " + op + " " + bootstrap::name_of(sender, info_.members[from]) +
                         " sends " + std::to_string(sent) + " elements to " +
                         bootstrap::name_of(receiver, info_.members[to]) + ", which expects " +
                         std::to_string(expected) +
                         "; no array was changed; compare the input splits of the sender with the "
                         "output splits of the receiver",
                     {.op = op,
                      .sequence = prepared.job.header.sequence,
                      .rank = info_.rank,
                      .peer = info_.rank == sender ? receiver : sender});
    }
}

// Returns each rank's call.counts, by rank.
std::vector<size_t> CallRunner::gather_splits(const PreparedCall& prepared) {
  const auto& counts = prepared.call.counts;
  const size_t count = counts.size();
  std::vector<size_t> table(count * static_cast<size_t>(info_.size));
  engine::Job job{.header = prepared.job.header,
                  .input = reinterpret_cast<const std::byte*>(counts.data()),
                  .output = reinterpret_cast<std::byte*>(table.data()),
                  .element_bytes = sizeof(size_t),
                  .size = info_.size,
                  .operation = Operation::all_gather,
                  .count = count};
  if (shares_one_host()) {
    run_shared(job, prepared.deadline);
    return table;
  }
  const Call gather{.operation = Operation::all_gather, .dtype = Dtype::int64, .count = count};
  const Algorithm by = collectives::choose({.operation = gather.operation,
                                            .dtype = gather.dtype,
                                            .size = info_.size,
                                            .count = count,
                                            .hosts = info_.host_count,
                                            .thresholds = thresholds_});
  job.schedule = &plans_.find(gather, by, count).schedule;
  engine::PlanTask task = begin_plan(job);
  engine_.run(task, job.header, prepared.deadline);
  return table;
}

}  // namespace pycomm::group
