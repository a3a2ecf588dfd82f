// How the ranks agree about a collective on device arrays before one of them enqueues it: by a
// barrier whose frames carry the call's signature. For a message only its two ranks agree
// (engine/messenger.cpp).
//
// No rank leaves a barrier before it knows of every other rank, either directly or through
// ranks whose signature matched. So either all ranks pass or none does.
//
// Also compares the counts of an all_to_all before an output changes.
#include <string>
#include <vector>

#include "collectives/choose.h"
#include "group/check.h"
#include "group/host_group.h"
#include "shared/shared_call.h"

namespace pycomm {

void HostGroup::agree(const Call& call, const Deadline& deadline) {
  const Header signature = signature_of(call, call.algorithm);
  // Like a barrier, this returns once all ranks have sent their counts.
  if (call.operation == Operation::all_to_all && !call.counts.empty())
    return check_splits(call, signature, deadline);
  if (region_ && host_count_ == 1) {
    const SharedJob nothing{.operation = Operation::barrier, .element_bytes = 1};
    const Header header = engine_.next_header(signature);
    region_->begin(header);
    SharedCall run(engine_, *region_, nothing, header);
    return engine_.run(run, header, deadline);
  }
  const Call barrier;
  const Algorithm by = choose({.size = options_.size, .hosts = host_count_});
  PlanJob job;
  job.schedule = &planned(barrier, by, 0).schedule;
  job.signature = signature;
  job.element_bytes = 1;
  job.size = options_.size;
  run_plan(job, deadline);
}

// Gathers the counts of all ranks in frames that carry the call's signature. The call's own frames
// tell a rank only the counts towards itself, so a rank with matching counts would miss a mismatch
// between two others. All ranks get the same table: all throw or none does, and the epoch
// continues.
//
// Cost: one all_gather of 2 size() counts from each rank.
void HostGroup::check_splits(const Call& call, const Header& signature, const Deadline& deadline) {
  const auto size = static_cast<size_t>(options_.size);
  const uint32_t sequence = engine_.next_header({}).sequence;
  const std::vector<size_t> table = gather_splits(call, signature, deadline);
  for (size_t from = 0; from < size; ++from)
    for (size_t to = 0; to < size; ++to) {
      const size_t sent = table[from * 2 * size + to];
      const size_t expected = table[to * 2 * size + size + from];
      if (sent == expected) continue;
      const int sender = static_cast<int>(from), receiver = static_cast<int>(to);
      const std::string op(name_of(call.operation));
      throw Mismatch("ranks disagree about call " + std::to_string(sequence) + ": in " + op + " " +
                         name_of(sender, members_[from]) + " sends " + std::to_string(sent) +
                         " elements to " + name_of(receiver, members_[to]) + ", which expects " +
                         std::to_string(expected) +
                         "; no array was changed; compare the input splits of the sender with the "
                         "output splits of the receiver",
                     {.op = op,
                      .sequence = sequence,
                      .rank = options_.rank,
                      .peer = options_.rank == sender ? receiver : sender});
    }
}

// Returns each rank's call.counts, by rank.
std::vector<size_t> HostGroup::gather_splits(const Call& call, const Header& signature,
                                             const Deadline& deadline) {
  const size_t count = call.counts.size();
  std::vector<size_t> table(count * static_cast<size_t>(options_.size));
  const auto* input = reinterpret_cast<const std::byte*>(call.counts.data());
  auto* output = reinterpret_cast<std::byte*>(table.data());
  if (region_ && host_count_ == 1) {
    const SharedJob shared{.operation = Operation::all_gather,
                           .input = input,
                           .output = output,
                           .count = count,
                           .element_bytes = sizeof(size_t)};
    const Header header = engine_.next_header(signature);
    region_->begin(header);
    SharedCall run(engine_, *region_, shared, header);
    engine_.run(run, header, deadline);
    return table;
  }
  const Call gather{.operation = Operation::all_gather, .dtype = Dtype::int64, .count = count};
  const Algorithm by = choose({.operation = gather.operation,
                               .dtype = gather.dtype,
                               .size = options_.size,
                               .count = count,
                               .hosts = host_count_,
                               .thresholds = thresholds_});
  PlanJob job;
  job.schedule = &planned(gather, by, count).schedule;
  job.signature = signature;
  job.input = input;
  job.output = output;
  job.element_bytes = sizeof(size_t);
  job.size = options_.size;
  run_plan(job, deadline);
  return table;
}

}  // namespace pycomm
